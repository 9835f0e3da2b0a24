"""Bodies of the OpenAI API as checked values: options of sampling, prompts, how to answer."""

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np

from lnssm_jax.files.reading import DataError
from lnssm_jax.pretrained import texts
from lnssm_jax.pretrained.chat import ChatTemplate
from lnssm_jax.pretrained.loaded import LoadedModel
from lnssm_jax.sampling import SamplingOptions

# Values that ask for nothing, whatever the field is.
_NOTHING = (None, False, 0, "", [], {}, {"type": "text"})
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
_COUNTS = ("max_tokens", "max_completion_tokens", "top_k", "n", "seed")
_OWN = ("model", "stop", "stream", "stream_options", "user", "prompt", "messages", "special_tokens")
_MOST_STOPS = 16
_OTHERS = ("user", "tool")  # whose text nobody has checked


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
  _check(body)
  limit = body.get("max_completion_tokens")
  seed = body.get("seed")
  options = loaded.options(
    max_tokens=body.get("max_tokens") if limit is None else limit,
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
  prompts = _prompts(body, loaded) if chat is None else [_chat(body, loaded, chat)]
  count = 1 if body.get("n") is None else body["n"]
  if not 1 <= count <= most_texts // len(prompts):
    raise ValueError(
      f"n={count} for {len(prompts)} prompts must be at least 1, and at most {most_texts} in all."
    )
  longest = max(map(len, prompts))
  if longest + options.max_tokens > most_tokens:
    raise ValueError(
      f"max_tokens={options.max_tokens} after a prompt of {longest} tokens is more than the"
      f" {most_tokens} tokens that this server allows."
    )
  prompts = [prompt for prompt in prompts for _ in range(count)]
  usage = (body.get("stream_options") or {}).get("include_usage", False)
  return Request(prompts, options, until, bool(body.get("stream")), bool(usage))


def _check(body: Mapping[str, Any]) -> None:
  for name, value in body.items():
    if value is None:
      continue
    kind = type(value)
    if name in _NUMBERS and kind not in (int, float):
      raise ValueError(f"{name}={value!r:.50} is no number.")
    if name in _COUNTS and kind is not int:
      raise ValueError(f"{name}={value!r:.50} is no whole number.")
    if name in (*_NUMBERS, *_COUNTS, *_OWN) or value in _NOTHING or (name, value) == ("best_of", 1):
      continue
    raise ValueError(f"{name}={value!r:.50} is not supported; leave it out.")
  if not isinstance(body.get("stream_options") or {}, dict):
    raise ValueError("stream_options is no object.")


def _chat(body, loaded: LoadedModel, chat: ChatTemplate | DataError) -> np.ndarray:
  """The prompt of messages, in which others may spell out no special token."""
  if isinstance(chat, DataError):
    raise chat
  given = body.get("messages")
  messages = [_joined(message) for message in given] if isinstance(given, list) else []
  for number, message in enumerate(messages):
    tokenizer: Any = loaded.tokenizer  # of a template: that of a file
    if message.get("role") in _OTHERS and tokenizer.special_in(str(message.get("content"))):
      raise ValueError(f"messages[{number}] spells out a special token of the model; remove it.")
  return texts.encode_prompt(loaded.tokenizer, chat.prompt(messages))


def _joined(message: Any) -> dict[str, Any]:
  """A message whose content is a text, if it had parts that are texts."""
  message = message if isinstance(message, dict) else {}
  parts = message.get("content")
  if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
    return message
  found = [part.get("text") for part in parts if part.get("type") == "text"]
  if len(found) < len(parts) or not all(isinstance(text, str) for text in found):
    return message
  return message | {"content": "".join(found)}


def _prompts(body: Mapping[str, Any], loaded: LoadedModel) -> list[np.ndarray]:
  """Prompts of text or tokens, one or several."""
  given, special = body.get("prompt"), body.get("special_tokens") or "parse"
  one = isinstance(given, str) or (
    isinstance(given, list) and given and all(type(x) is int for x in given)
  )
  several = [given] if one else given
  if not isinstance(several, list) or not several:
    raise ValueError("prompt is no text, and no list of texts; give one.")
  found = []
  for number, prompt in enumerate(several):
    if isinstance(prompt, str):
      found.append(texts.encode_prompt(loaded.tokenizer, prompt, special))
    elif isinstance(prompt, list) and prompt and all(type(x) is int for x in prompt):
      found.append(np.array(prompt))
    else:
      raise ValueError(f"prompt {number} is no text, and no list of token ids with at least one.")
  return found
