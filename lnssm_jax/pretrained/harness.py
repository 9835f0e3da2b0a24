"""A model as the package `lm_eval` (Language Model Evaluation Harness) asks it.

    import lm_eval
    from lnssm_jax.pretrained import lm_eval_model

    model = lm_eval_model(lnssm_jax.load_model("exported"), batch=16)
    lm_eval.simple_evaluate(model, tasks=["my_task"])

Requests are answered in batches by the recurrent state. Common contexts are read once, and a text
of any length in one pass; where a model keeps a cache of bounded length, contexts are cut on the
left and rolling windows follow each other, as that package does for transformers. An empty context
is a line feed, since these models do not learn to predict from the end of a document.
"""

import importlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lnssm_jax.generate import SamplingOptions
from lnssm_jax.pretrained import texts
from lnssm_jax.pretrained.loaded import LoadedModel

MAX_TOKENS = 256  # of an answer whose request names none, as in `lm_eval`


def lm_eval_model(loaded: LoadedModel, *, batch: int = 8) -> Any:
  """An `lm_eval.api.model.LM` that answers with this model, `batch` requests at once.

  Raises:
    ValueError: the package is not installed.
  """
  try:
    base = importlib.import_module("lm_eval.api.model").LM
  except ImportError:
    raise ValueError("the adapter needs the package lm_eval: pip install lm_eval") from None
  model = type("LnssmJaxLM", (Answers, base), {})()
  model.bind(loaded, batch)
  return model


class Answers:
  """The three kinds of requests; `args` of each has its arguments."""

  def bind(self, loaded: LoadedModel, batch: int) -> None:
    """Sets the model and the number of requests at once."""
    self._model, self._tokenizer, self._batch = loaded.model, loaded.tokenizer, batch
    self._opening = self._tokenizer.encode(texts.OPENING)

  @property
  def tokenizer_name(self) -> str:
    """A name for caches of requests."""
    return self._tokenizer.fingerprint

  def loglikelihood(
    self, requests: Sequence[Any], disable_tqdm: bool = False
  ) -> list[tuple[float, bool]]:
    """(log-likelihood of the text after its context, whether it is the greedy answer) of each."""
    pairs = [self._pair(*request.args) for request in requests]
    rows = [np.concatenate(pair) for pair in pairs]
    found = texts.score_tokens(
      self._model, rows, [len(context) for context, _ in pairs], batch=self._batch
    )
    return [(score.total, bool(score.likeliest.all())) for score in found]

  def loglikelihood_rolling(
    self, requests: Sequence[Any], disable_tqdm: bool = False
  ) -> list[float]:
    """Log-likelihood of each whole text."""
    rows, starts, owners = [], [], []
    for owner, request in enumerate(requests):
      for row, start in self._windows(self._tokenizer.encode(request.args[0])):
        rows.append(row)
        starts.append(start)
        owners.append(owner)
    totals = [0.0] * len(requests)
    found = texts.score_tokens(self._model, rows, starts, batch=self._batch)
    for owner, score in zip(owners, found, strict=True):
      totals[owner] += score.total
    return totals

  def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
    """Continuations up to the first of the strings `until`, greedy unless a request samples."""
    answers: dict[int, str] = {}
    alike: dict[str, list[int]] = {}
    for number, request in enumerate(requests):
      alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
    for numbers in alike.values():
      options, until = self._sampling(requests[numbers[0]].args[1])
      rows = {n: self._cut(self._encode(requests[n].args[0]), options.max_tokens) for n in numbers}
      order = sorted(numbers, key=lambda number: len(rows[number]))
      for first in range(0, len(order), self._batch):
        part = order[first : first + self._batch]
        found = texts.complete_tokens(
          self._model, self._tokenizer, [rows[n].tolist() for n in part], options, until=until
        )
        answers |= dict(zip(part, found, strict=True))
    return [answers[number] for number in range(len(requests))]

  def _encode(self, text: str) -> np.ndarray:
    return self._tokenizer.encode(text) if text else self._opening

  def _pair(self, context: str, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of context and text. White space between them belongs to the text.

    They are encoded together, so that a word is one token, unless that leaves nothing of the text.
    """
    kept = context.rstrip()
    context, text = kept, context[len(kept) :] + text
    before = self._encode(context)
    after = self._tokenizer.encode(context + text)[len(before) if context else 0 :]
    if not len(after):
      after = self._tokenizer.encode(text)
    return self._cut(before, len(after)), after

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

  def _sampling(self, given: dict[str, Any]) -> tuple[SamplingOptions, list[str]]:
    """Options of a request, whose names are those of `lm_eval`."""
    until = given.get("until") or []
    draws = given.get("do_sample", bool(given.get("temperature")))
    names = ("max_gen_toks", "max_new_tokens", "max_tokens")
    counts = [given[name] for name in names if given.get(name) is not None]
    options = SamplingOptions(
      max_tokens=int(counts[0]) if counts else MAX_TOKENS,
      temperature=float(given.get("temperature") or 1.0) if draws else 0.0,
      top_k=given.get("top_k") or None,
      top_p=given.get("top_p"),
      stop_token=self._tokenizer.end_of_text,
    )
    return options, [until] if isinstance(until, str) else list(until)
