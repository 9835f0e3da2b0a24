"""Conversations as text, by the chat template of a checkpoint: Jinja, in a sandbox.

    (text, places), *more = ChatTemplate(tokenizer).turns([{"role": "user", "content": "Hi"}, ...])

The template is chat_template.jinja, or "chat_template" of tokenizer_config.json, next to the
tokenizer. It sees what transformers 5 gives it: messages, tools, add_generation_prompt, the texts
of special tokens, `raise_exception`, `strftime_now`, the filter `tojson` and blocks `generation`.
It is a program of the checkpoint's author: it reaches nothing else, but its time is not limited.
"""

import contextlib
import datetime
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from lnssm_jax.files.reading import DataError, read_bytes, read_json
from lnssm_jax.pretrained import folders
from lnssm_jax.pretrained import special_tokens as special
from lnssm_jax.pretrained.tokenizers import FileTokenizer, Tokenizer

TEMPLATE, GENERATION = "chat_template.jinja", "generation_config.json"
_MAX_TEMPLATE = 1 << 22  # bytes
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")


class Turns(NamedTuple):
  """A conversation, and the places [begin, end) of what the model is to write in it."""

  text: str
  places: tuple[tuple[int, int], ...]


class ChatTemplate:
  """The chat template next to a tokenizer.

  Attributes:
    fingerprint: of the template and of the tokens that end a turn.

  Raises:
    DataError: there is none, it is no template, or the package jinja2 is not installed.
  """

  def __init__(self, tokenizer: Tokenizer):
    if not isinstance(tokenizer, FileTokenizer):
      raise DataError(
        f"the tokenizer {tokenizer.spec!r} has no chat template; use the folder of a model for"
        " chats, with tokenizer.json and chat_template.jinja or tokenizer_config.json."
      )
    self._folder = folder = tokenizer.folder
    self._tokenizer = tokenizer
    settings = special.read_settings(folder, follow_links=True)
    source = _source(folder, settings)
    tokens = ((name, special.token_of(settings, name)) for name in _TOKENS)
    self._known = {name: token for name, token in tokens if token is not None}
    for name in ("bos_token", "eos_token"):
      token = self._known.get(name)
      if token is not None and name in source and not tokenizer.has(token):
        raise DataError(
          f"{folder}: {name}={token!r:.80}, which the chat template may write, is not in"
          " tokenizer.json, so that it would be ordinary text; write the folder again with both:"
          " AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
        )
    named = tokenizer.names_of((tokenizer.end_of_text, *_ends(folder)))
    known = [self._known["eos_token"]] if "eos_token" in self._known else []
    self._ends = list(dict.fromkeys([*named, *known]))
    if not self._ends:
      raise DataError(
        f"{folder}: eos_token_id={tokenizer.end_of_text} is not in tokenizer.json, and"
        f" {special.CONFIG} has no eos_token; correct them, so that a reply has an end."
      )
    self.fingerprint = hashlib.sha256(json.dumps([source, self._ends]).encode()).hexdigest()
    self._template = _compiled(source, folder)

  def prompt(
    self, messages: Sequence[Mapping[str, Any]], tools: Any = None, variables: Any = None
  ) -> str:
    """The text before the model's reply, without what `generate` puts before every prompt.

    Arguments are those of `turns`.

    Raises:
      DataError: a message is none, or the template rejects them.
    """
    render = self._renderer(tools, variables, "messages")
    text = render(_checked(messages, "messages"), reply=True)
    before = "".join(self._tokenizer.names_of(self._tokenizer.added.before))
    if not text.startswith(before):
      raise DataError(
        f"the chat template of {self._folder} does not begin with {before!r}, which the tokenizer"
        " puts before every text; remove it from one of them."
      )
    return text.removeprefix(before)

  def turns(
    self,
    messages: Any,
    *,
    tools: Any = None,
    variables: Any = None,
    where: str = "messages",
    special_tokens: special.InText = "text",
    first: int = 0,
  ) -> list[Turns]:
    """The text of a conversation, and the replies in it, each with the token that ends it.

    A reply is what follows the template's text for the messages before it, with its generation
    prompt, up to the first token that ends a text: what `generate` would have to write. A message
    of the assistant with `"weight": 0` is none. A template may write a reply in another way when
    more messages follow, such as without its thoughts. Then the conversation up to that reply is a
    text of its own.

    Args:
      tools: descriptions of functions, a list.
      variables: further ones of the template by name, such as `{"enable_thinking": False}`.
      where: place of the messages, for errors.
      special_tokens: "text" rejects messages that spell out a special token, which would be one.
      first: the number of the first message that may be a target.

    Raises:
      DataError: a message is none or has a special token, the template rejects them, or a reply
        does not follow its prompt.
    """
    given = _checked(messages, where)
    if special_tokens == "text":
      named = {f"message {number}": message for number, message in enumerate(given)}
      for name, value in (named | {"tools": tools, "chat_template_kwargs": variables}).items():
        found = special_in(self._tokenizer, value)
        if found is not None:
          raise DataError(
            f"{where}: {name} spells out the special token {found!r}; remove it, or set"
            " data.special_tokens='parse' for text that you trust."
          )
    render = self._renderer(tools, variables, where)
    text = render(given)
    places, alone = [], []
    for number, message in enumerate(messages[first:], first):
      if message["role"] != "assistant" or message.get("weight", 1) == 0:
        continue
      before = render(given[:number], reply=True)
      if text.startswith(before):
        places.append(self._reply(text, before, where, number))
      else:
        until = render(given[: number + 1])
        alone.append(Turns(until, (self._reply(until, before, where, number),)))
    return [*alone, Turns(text, tuple(places))] if places or not alone else alone

  def _reply(self, text: str, before: str, where: str, number: int) -> tuple[int, int]:
    """The place of the reply in `text` after `before`."""
    ends = [text.find(end, len(before)) + len(end) for end in self._ends]
    ends = [end for end, name in zip(ends, self._ends, strict=True) if end >= len(name)]
    begins = text.startswith(before)
    if not begins or not ends:
      why = "does not end a reply by a token for that" if begins else "does not repeat its prompt"
      raise DataError(
        f"{where}: the chat template of {self._folder} {why}, so that message {number} cannot be"
        " a target; use another template, or rows of a prompt and a completion (data.fields)."
      )
    return len(before), min(ends)

  def _renderer(self, tools: Any, variables: Any, where: str) -> Callable[..., str]:
    """(messages, reply=whether with a generation prompt) -> their text."""
    if not isinstance(tools, list | tuple | None):
      raise DataError(f'{where}: "tools" is {type(tools).__name__}, expected a list of objects.')
    own = {"messages", "tools", "add_generation_prompt", *_TOKENS}
    if variables is not None and (not isinstance(variables, dict) or own & variables.keys()):
      raise DataError(
        f"{where}: chat_template_kwargs={variables!r:.80} must be an object of variables of the"
        f" template, which are not {', '.join(sorted(own))}."
      )

    def render(messages: Any, reply: bool = False) -> str:
      known = {**self._known, **(variables or {}), "messages": messages, "tools": tools}
      try:
        return self._template.render(known, add_generation_prompt=reply)
      except Exception as error:  # of the template: any
        raise DataError(
          f"{where}: the chat template of {self._folder} rejects the messages: {error!s:.200}."
        ) from None

    return render


def joined(message: Mapping[str, Any]) -> Mapping[str, Any]:
  """A message whose content is a text, if it had parts that are texts."""
  parts = message.get("content")
  if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
    return message
  found = [part.get("text") for part in parts if part.get("type") == "text"]
  if len(found) < len(parts) or not all(isinstance(text, str) for text in found):
    return message
  return {**message, "content": "".join(found)}


def special_in(tokenizer: FileTokenizer, message: Any) -> str | None:
  """The first special token that a text in a message spells out, or its JSON, if any."""
  texts, rest = [json.dumps(message, ensure_ascii=False)], [message]
  while rest:  # JSON writes a quote in a text with a backslash before it
    value = rest.pop()
    if isinstance(value, str):
      texts.append(value)
    elif isinstance(value, dict | list | tuple):
      rest += [*value, *value.values()] if isinstance(value, dict) else value
  return next(filter(None, map(tokenizer.special_in, texts)), None)


def write_tokenizer(folder: Path, tokenizer: FileTokenizer) -> dict[str, str]:
  """Writes tokenizer.json with the files for chats next to it; returns these, as `files_of`."""
  (folder / "tokenizer.json").write_bytes(tokenizer.standalone)
  files = files_of(tokenizer)
  for name, content in files.items():
    (folder / name).write_text(content)
  return files


def files_of(tokenizer: FileTokenizer) -> dict[str, str]:
  """{name: content} of the files for chats next to a tokenizer, for a copy of it."""
  found, folder = {}, tokenizer.folder
  with contextlib.suppress(DataError):
    settings = special.read_settings(folder, follow_links=True)
    found[TEMPLATE] = _source(folder, settings)
    tokens = {name: special.token_of(settings, name) for name in _TOKENS}
    named = {"tokenizer_class": "PreTrainedTokenizerFast"} | tokens
    found[special.CONFIG] = json.dumps({x: y for x, y in named.items() if y is not None}) + "\n"
  with contextlib.suppress(OSError):
    found[GENERATION] = read_bytes(folder / GENERATION, _MAX_TEMPLATE, follow_links=True).decode()
  return found


def _checked(messages: Any, where: str) -> list[dict[str, Any]]:
  """The messages without their weights, and contents that are parts of text as one."""
  if not isinstance(messages, list | tuple) or not messages:
    raise DataError(
      f'{where}: found {messages!r:.60}, expected messages, such as [{{"role": "user", "content":'
      ' "Hi"}].'
    )
  messages = [joined(x) if isinstance(x, Mapping) else x for x in messages]
  for number, message in enumerate(messages):
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str):
      raise DataError(f'{where}: message {number} is {message!r:.60}; it needs a "role", a string.')
    content, calls = message.get("content"), message.get("tool_calls")
    if not isinstance(content, str) and not (content is None and isinstance(calls, list)):
      raise DataError(
        f'{where}: "content" of message {number} is {type(content).__name__}, expected a string:'
        " images and other parts are not read."
      )
    weight = message.get("weight")  # None too, as Parquet has it of the other messages
    if weight is not None and (type(weight) is not int or weight not in (0, 1)):
      raise DataError(
        f'{where}: "weight" of message {number} is {message["weight"]!r:.60}; it is 0 for a reply'
        " that is no target, and else 1."
      )
    try:
      json.dumps(dict(message), ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
      raise DataError(
        f"{where}: message {number} has an unpaired surrogate, which cannot be encoded. Replace it."
      ) from None
  return [{name: x for name, x in message.items() if name != "weight"} for message in messages]


def _source(folder: Path, settings: Mapping[str, Any]) -> str:
  path, found = folder / TEMPLATE, settings.get("chat_template")
  try:
    if os.path.lexists(path):  # a link to nothing is an error
      return read_bytes(path, _MAX_TEMPLATE, follow_links=True).decode()
  except (OSError, ValueError) as error:
    raise DataError(f"{path} cannot be read ({error}).") from None
  if isinstance(found, list):  # several by name
    named = {x.get("name"): x.get("template") for x in found if isinstance(x, dict)}
    found = named.get("default")
  if not isinstance(found, str):
    raise DataError(
      f"{folder} has no chat template: neither {TEMPLATE}, nor chat_template in {special.CONFIG};"
      " use the folder of a model for chats."
    )
  return found


def _ends(folder: Path) -> tuple[int, ...]:
  """Tokens that end a generated text, by generation_config.json."""
  try:
    found = read_json(folder / GENERATION, _MAX_TEMPLATE, follow_links=True, strict=False)
  except FileNotFoundError:
    return ()
  except (OSError, ValueError) as error:
    raise DataError(f"{folder / GENERATION} cannot be read ({error}).") from None
  return folders.ends_of(folder / GENERATION, found)


def _compiled(source: str, folder: Path) -> Any:
  try:
    from jinja2 import ext, sandbox  # pyrefly: ignore
  except ImportError:
    raise DataError(f"the chat template of {folder} needs jinja2: pip install jinja2") from None

  class Generation(ext.Extension):
    """`{% generation %}`, which marks replies for transformers: its body, as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
      next(parser.stream)
      return parser.parse_statements(("name:endgeneration",), drop_needle=True)

  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
  )
  environment.filters["tojson"] = _json
  environment.globals["raise_exception"] = _reject
  environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
  try:
    return environment.from_string(source)
  except Exception as error:  # also of nesting, and of numbers of many digits
    raise DataError(f"the chat template of {folder} is none: {error!s:.200}.") from None


def _json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
  return json.dumps(
    value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
  )


def _reject(message: str) -> NoReturn:
  raise DataError(message)
