"""A model as the package `lm_eval` (Language Model Evaluation Harness) asks it.

    import lm_eval
    from lnssm_jax.pretrained import lm_eval_model

    model = lm_eval_model(lnssm_jax.load_model("exported"), batch=16)
    lm_eval.simple_evaluate(model, tasks=["my_task"])

Requests are answered in batches by the recurrent state. Common contexts are read once, and a text
of any length in one pass; where a model keeps a cache of bounded length, contexts are cut on the
left and rolling windows follow each other, as that package does for transformers.

Texts are encoded as the tokenizer's own files encode them, also with the tokens, such as BOS, that
they put around a text, unless it begins with them. Different from the package's own model for
transformers:

* An empty context, and the beginning of a rolling text, is what the tokenizer puts before every
  text, or else a line feed, since these models do not learn to predict from the end of a document;
  `prefix_token` names another, such as the package's. It is read, and never scored.
* A token that has characters of context and text is scored. The package counts the tokens of the
  context alone, so that such characters may be neither read nor scored.
* An answer ends before the string of `until` that is complete first, whatever else is in the batch.
"""

import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lnssm_jax.generate import SamplingOptions
from lnssm_jax.ops.core.checks import is_integer, is_number
from lnssm_jax.pretrained import texts
from lnssm_jax.pretrained.loaded import LoadedModel
from lnssm_jax.pretrained.special_tokens import InText

MAX_TOKENS = 256  # of an answer whose request names none, as in `lm_eval`
# Names of the number of tokens of an answer; the first that is given counts, as in `lm_eval`.
_COUNTS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_USED = ("until", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Options of transformers with the values, besides None, that change no answer.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
  "num_beams": (1,),
  "num_beam_groups": (1,),
  "num_return_sequences": (1,),
  "no_repeat_ngram_size": (0,),
  "encoder_no_repeat_ngram_size": (0,),
  "encoder_repetition_penalty": (1,),
  "length_penalty": (1,),
  "diversity_penalty": (0,),
  "early_stopping": (False,),
  "typical_p": (1,),
  "epsilon_cutoff": (0,),
  "eta_cutoff": (0,),
  "penalty_alpha": (0,),
  "guidance_scale": (1,),
  "min_length": (0,),
  "min_new_tokens": (0,),
  "renormalize_logits": (False,),
  "frequency_penalty": (0,),
  "presence_penalty": (0,),
  "bad_words_ids": (),
  "use_cache": (True, False),
}


def lm_eval_model(
  loaded: LoadedModel,
  *,
  batch: int = 8,
  special_tokens: InText = "parse",
  prefix_token: int | None = None,
) -> Any:
  """An `lm_eval.api.model.LM` that answers with this model, `batch` requests at once.

  Args:
    special_tokens: as in `LoadedModel.generate`, for all texts.
    prefix_token: the token that an empty context and a rolling text begin with.

  Raises:
    ValueError: the package is not installed.
  """
  try:
    base = importlib.import_module("lm_eval.api.model").LM
  except ImportError:
    raise ValueError("the adapter needs the package lm_eval: pip install lm_eval") from None
  model = type("LnssmJaxLM", (Answers, base), {})()
  model.bind(loaded, batch, special_tokens, prefix_token)
  return model


class Answers:
  """The three kinds of requests; `args` of each has its arguments.

  A request whose arguments are of another type, or whose options are not implemented, raises
  ValueError before any is answered.
  """

  def bind(
    self,
    loaded: LoadedModel,
    batch: int,
    special_tokens: InText = "parse",
    prefix_token: int | None = None,
  ) -> None:
    """Sets the model and the number of requests at once; further arguments as `lm_eval_model`."""
    self._model, self._tokenizer, self._batch = loaded.model, loaded.tokenizer, batch
    self._special_tokens: InText = special_tokens
    self._stop_tokens = loaded.stop_tokens
    self._added = self._tokenizer.added
    before = self._added.before or self._tokenizer.encode(texts.OPENING)
    self._opening = np.array(before if prefix_token is None else [prefix_token], np.int32)

  @property
  def tokenizer_name(self) -> str:
    """A name for caches of requests."""
    return self._tokenizer.fingerprint

  def loglikelihood(
    self, requests: Sequence[Any], disable_tqdm: bool = False
  ) -> list[tuple[float, bool]]:
    """(log-likelihood of the text after its context, whether it is the greedy answer) of each.

    Raises:
      ValueError: a text is empty: its log-likelihood of 0 would be more than that of any other.
    """
    pairs = [self._pair(*_strings(request, "context", "text")) for request in requests]
    rows, starts = [np.concatenate(pair) for pair in pairs], [len(context) for context, _ in pairs]
    found = texts.score_tokens(self._model, rows, starts, batch=self._batch)
    return [(score.total, bool(score.likeliest.all())) for score in found]

  def loglikelihood_rolling(
    self, requests: Sequence[Any], disable_tqdm: bool = False
  ) -> list[float]:
    """Log-likelihood of each whole text; 0 of an empty one."""
    rows, starts, owners = [], [], []
    for owner, request in enumerate(requests):
      (text,) = _strings(request, "text")
      tokens = self._whole(text) if text else np.zeros(0, np.int32)
      if self._begun(tokens):  # that is the opening
        tokens = tokens[len(self._added.before) :]
      for row, start in self._windows(tokens):
        rows.append(row)
        starts.append(start)
        owners.append(owner)
    totals = [0.0] * len(requests)
    found = texts.score_tokens(self._model, rows, starts, batch=self._batch)
    for owner, score in zip(owners, found, strict=True):
      totals[owner] += score.total
    return totals

  def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
    """Continuations up to the first of the strings `until`, greedy unless a request samples.

    Raises:
      ValueError: an option is not implemented, and has not the value that changes nothing.
    """
    answers: dict[int, str] = {}
    alike: dict[tuple[SamplingOptions, tuple[str, ...]], list[int]] = {}
    rows = []
    for number, request in enumerate(requests):
      (context,), (_, given) = (
        _strings(request, "context"),
        _arguments(request, "context", "options"),
      )
      options, until = how = self._sampling(given)
      rows.append(self._cut(self._context(context), options.max_tokens))
      alike.setdefault(how, []).append(number)
    for (options, until), numbers in alike.items():
      order = sorted(numbers, key=lambda number: len(rows[number]))
      for first in range(0, len(order), self._batch):
        part = order[first : first + self._batch]
        found = texts.complete_tokens(
          self._model, self._tokenizer, [rows[n].tolist() for n in part], options, until=until
        )
        answers |= dict(zip(part, found, strict=True))
    return [answers[number] for number in range(len(requests))]

  def _whole(self, text: str) -> np.ndarray:
    """Tokens of a text, with those around it unless it spells out those before it."""
    tokens, (before, after) = self._tokenizer.encode(text, self._special_tokens), self._added
    return tokens if self._begun(tokens) else np.array([*before, *tokens, *after], np.int32)

  def _begun(self, tokens: np.ndarray) -> bool:
    """Whether tokens begin with those that are put before every text."""
    before = self._added.before
    return bool(before) and tuple(tokens[: len(before)].tolist()) == before

  def _context(self, text: str) -> np.ndarray:
    return self._whole(text) if text else self._opening

  def _pair(self, context: str, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of context and text, which are those of one text; white space before it is its own."""
    if not text:
      raise ValueError(
        f"a request has an empty text after context={context!r:.50}; give the text to score."
      )
    kept = context.rstrip()
    context, text = kept, context[len(kept) :] + text
    pairs = [(context, text)]
    ((tokens, start),) = self._tokenizer.encode_continuations(pairs, self._special_tokens)
    begun, (before, after) = self._begun(tokens), self._added
    if not context:
      first, start = self._opening, len(before) if begun else 0
    else:
      first = np.array([*(() if begun else before), *tokens[:start]], np.int32)
    rest = np.array([*tokens[start:], *(() if begun else after)], np.int32)
    if not len(first):  # the first token has characters of both
      first = self._opening
    if start == len(tokens):
      raise ValueError(
        f"text={text!r:.50} after context={context!r:.50} has no token of its own; give more text."
      )
    return self._cut(first, len(rest)), rest

  def _cut(self, context: np.ndarray, after: int) -> np.ndarray:
    """The end of a context that a bounded cache holds with the tokens after it, all but the last.

    At least one token is left; what is too long then raises where it is read.
    """
    limit = self._model.max_length
    return context if limit is None else context[-max(1, limit + 1 - after) :]

  def _windows(self, tokens: np.ndarray) -> Iterable[tuple[np.ndarray, int]]:
    """(tokens, first to be scored) of a text's windows, one if nothing bounds its length.

    Each token is scored once; the last window begins earlier, so that it is full.
    """
    start = len(self._opening)
    stream = np.concatenate([self._opening, tokens])
    limit = self._model.max_length or max(1, len(stream))
    for first in range(start, len(stream), limit):
      last = min(first + limit, len(stream))
      begin = max(0, last - 1 - limit)
      yield stream[begin:last], first - begin

  def _sampling(self, given: Any) -> tuple[SamplingOptions, tuple[str, ...]]:
    """Options of a request, whose names are those of `lm_eval` and transformers, and its ends."""
    if not isinstance(given, Mapping):
      raise ValueError(
        f"options={given!r:.80} of a request must be a dictionary, such as {{'until': ['\\n']}}."
      )
    for name, value in given.items():
      if name in _COUNTS or name in _USED:
        continue
      if name not in _NEUTRAL:
        raise ValueError(
          f"the option {name!r:.80} of a request is not known; use {', '.join((*_COUNTS, *_USED))}."
        )
      if value is not None and not (np.isscalar(value) and value in _NEUTRAL[name]):
        neutral = " or ".join(map(repr, (*_NEUTRAL[name], None)))
        raise ValueError(
          f"{name}={value!r:.80} of a request is not implemented; leave it out, or give {neutral}."
        )
    until = given.get("until")
    if not (until is None or isinstance(until, str | list | tuple)):
      raise ValueError(f"until={until!r:.80} of a request must be a string or a list of strings.")
    until = texts.check_until([until] if isinstance(until, str) else until or ())
    counts = [given[name] for name in _COUNTS if given.get(name) is not None]
    temperature = _number(given, "temperature", 0.0)
    draws = given.get("do_sample")
    if not (draws is None or isinstance(draws, bool)):
      raise ValueError(f"do_sample={draws!r:.80} of a request must be true or false.")
    if draws and given.get("temperature") is not None and temperature == 0:
      raise ValueError(
        "temperature=0 of a request with do_sample=True draws nothing; give a temperature above 0,"
        " or do_sample=False."
      )
    draws = temperature != 0 if draws is None else draws
    options = SamplingOptions(
      max_tokens=_whole_number(_COUNTS[0], counts[0] if counts else MAX_TOKENS),
      temperature=(temperature or 1.0) if draws else 0.0,
      top_k=_whole_number("top_k", given.get("top_k") or 0) or None,
      top_p=_number(given, "top_p", 1.0),
      min_p=_number(given, "min_p", 0.0) or None,
      repetition_penalty=_number(given, "repetition_penalty", 1.0),
      stop_token=self._stop_tokens,
    )
    return options, until


def _arguments(request: Any, *names: str) -> list[Any]:
  """The first arguments of a request."""
  found = list(request.args[: len(names)])
  if len(found) < len(names):
    raise ValueError(f"args={found!r:.80} of a request must be its {' and '.join(names)}.")
  return found


def _strings(request: Any, *names: str) -> list[str]:
  """The first arguments of a request, which must be strings."""
  found = _arguments(request, *names)
  for name, value in zip(names, found, strict=True):
    if not isinstance(value, str):
      raise ValueError(
        f"the {name} of a request is {value!r:.50} of type {type(value).__name__}; give a str."
      )
  return found


def _number(given: Mapping[str, Any], name: str, default: float) -> float:
  """A number among the options of a request; None is the default."""
  value = given.get(name)
  if value is None:
    return default
  if not is_number(value) or not math.isfinite(value):
    raise ValueError(f"{name}={value!r:.80} of a request must be a number.")
  return value


def _whole_number(name: str, value: Any) -> int:
  if not is_integer(value):
    raise ValueError(f"{name}={value!r:.80} of a request must be a whole number.")
  return value
