"""Bodies of the OpenAI API as checked values: options of sampling, prompts, how to answer."""

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np

from lnssm_jax.files.checked_json import check_shape
from lnssm_jax.files.reading import DataError
from lnssm_jax.mixers.common.checks import check_positive
from lnssm_jax.pretrained import texts
from lnssm_jax.pretrained.chat import ChatTemplate, joined, special_in
from lnssm_jax.pretrained.loaded import LoadedModel
from lnssm_jax.sampling import SamplingOptions

_TEXT, _COUNT, _NUMBER, _CHOICE = ((kind, None) for kind in (str, int, float, bool))
_FIELDS = {
  "model": _TEXT,
  "user": _TEXT,
  "temperature": _NUMBER,
  "top_p": _NUMBER,
  "min_p": _NUMBER,
  "repetition_penalty": _NUMBER,
  "max_tokens": _COUNT,
  "max_completion_tokens": _COUNT,
  "top_k": _COUNT,
  "n": _COUNT,
  "seed": _COUNT,
  "stop": (str, [str], None),
  "stream": _CHOICE,
  "stream_options": ({str: Any}, None),
}
_COMPLETION = _FIELDS | {"prompt": (str, [Any]), "special_tokens": _TEXT}
_CHAT = _FIELDS | {"messages": [{str: Any}]}
# Values that ask for nothing, whatever the field is; but logprobs=0 asks for those of the text.
_NOTHING = (None, False, 0, "", [], {}, {"type": "text"})
_MOST_STOPS = 16
_TRUSTED = ("system", "developer", "assistant")  # roles; texts of others nobody has checked


@dataclasses.dataclass(frozen=True)
class Request:
  """Values of a body.

  Attributes:
    prompts: token ids of each text to continue, in the order of the choices.
    until: a text ends before any of these.
    usage: whether a stream ends with the numbers of tokens.
  """

  prompts: list[np.ndarray]
  options: SamplingOptions
  until: tuple[str, ...]
  stream: bool
  usage: bool


def parse(
  body: Mapping[str, Any],
  loaded: LoadedModel,
  chat: ChatTemplate | DataError | None,
  *,
  most_texts: int,
  most_tokens: int,
) -> Request:
  """A request of /v1/completions, or with `chat`, or why there is none, /v1/chat/completions.

  Defaults are those of `LoadedModel.options`; without a seed the text is another each time.

  Args:
    most_texts: of one request.
    most_tokens: of a prompt and what may be drawn after it.

  Raises:
    ValueError: a field is unknown, unsupported or out of range; the message names it.
  """
  _check(body, _COMPLETION if chat is None else _CHAT)
  streaming = body.get("stream_options") or {}
  _check(streaming, {"include_usage": _CHOICE})
  several = _several(body) if chat is None else [None]
  count = 1 if body.get("n") is None else body["n"]
  if not 1 <= count <= most_texts // len(several):
    raise ValueError(
      f"n={count} for {len(several)} prompts must be at least 1, and at most {most_texts} in all."
    )
  name = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
  if body.get(name) is not None:
    check_positive(name, body[name])
  seed = body.get("seed")
  options = loaded.options(
    max_tokens=body.get(name),
    temperature=body.get("temperature"),
    top_k=body.get("top_k"),
    top_p=body.get("top_p"),
    min_p=body.get("min_p"),
    repetition_penalty=body.get("repetition_penalty"),
    seed=secrets.randbits(32) if seed is None else seed,
  )
  stop = body.get("stop") or ()
  until = texts.check_until((stop,) if isinstance(stop, str) else stop)
  if len(until) > _MOST_STOPS:
    raise ValueError(f"stop has {len(until)} strings; give at most {_MOST_STOPS}.")
  if chat is None:
    special = body.get("special_tokens") or "parse"
    prompts = [_prompt(loaded, number, x, special) for number, x in enumerate(several)]
  else:
    prompts = [_chat(body, loaded, chat)]
  longest = max(map(len, prompts))
  if longest + options.max_tokens > most_tokens:
    raise ValueError(
      f"{name}={options.max_tokens} after a prompt of {longest} tokens is more than the"
      f" {most_tokens} tokens that this server allows."
    )
  prompts = [prompt for prompt in prompts for _ in range(count)]
  usage = streaming.get("include_usage")
  return Request(prompts, options, until, bool(body.get("stream")), bool(usage))


def _check(body: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
  for name, value in body.items():
    if name in fields:
      check_shape(value, fields[name], name)
    elif (name, value) != ("best_of", 1) and (
      value not in _NOTHING or (name, value) == ("logprobs", 0)
    ):
      raise ValueError(f"{name:.80}={value!r:.50} is not supported; leave it out.")


def _chat(body, loaded: LoadedModel, chat: ChatTemplate | DataError) -> np.ndarray:
  """The prompt of messages, in which others may spell out no special token."""
  if isinstance(chat, DataError):
    raise chat
  messages = [joined(message) for message in body.get("messages", ())]
  for number, message in enumerate(messages):
    tokenizer: Any = loaded.tokenizer  # of a template: that of a file
    if message.get("role") not in _TRUSTED and special_in(tokenizer, message):
      raise ValueError(f"messages[{number}] spells out a special token of the model; remove it.")
  return texts.encode_prompt(loaded.tokenizer, chat.prompt(messages))


def _several(body: Mapping[str, Any]) -> list[Any]:
  """The prompts, each a text or token ids."""
  given = body.get("prompt")
  ids = isinstance(given, list) and given and all(type(x) is int for x in given)
  several = [given] if ids or isinstance(given, str) else given
  if not several:
    raise ValueError(f"prompt={given!r} is no text, and no list of texts; give one.")
  return several


def _prompt(loaded: LoadedModel, number: int, given: Any, special: Any) -> np.ndarray:
  """The tokens of a prompt of text or token ids."""
  if isinstance(given, str):
    return texts.encode_prompt(loaded.tokenizer, given, special)
  if not isinstance(given, list) or not given or any(type(x) is not int for x in given):
    raise ValueError(
      f"prompt {number} is {given!r:.50}; give a text, or a list of at least one token id."
    )
  if not 0 <= min(given) <= max(given) < loaded.model.vocab_size:
    raise ValueError(
      f"prompt {number} has token ids from {min(given)} to {max(given)}, but the model's vocabulary"
      f" is 0 to {loaded.model.vocab_size - 1}; was it encoded with another tokenizer?"
    )
  return np.array(given)
