"""Multiple choice and cloze by log-likelihood.

Rows of a .jsonl file: {"query", "choices", "gold"}, whose choices follow one query; or
{"context_options", "continuation", "gold"}, whose continuation follows each of several contexts
(schemas of Winograd); or for cloze {"context", "continuation"}. A space joins the two, unless the
first ends with white space, and they are encoded as one text.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.samples import read_samples
from lnssm_jax.pretrained import texts
from lnssm_jax.pretrained.loaded import LoadedModel
from train.scoring.report import Report


def choice(
  loaded: LoadedModel, paths: Sequence[str], *, limit: int | None = None, batch: int = 8
) -> Report:
  """Accuracy of the choice of the largest log-likelihood, also per character and per byte.

  These are `acc`, `acc_norm` and `acc_bytes` of the package `lm_eval`: characters and bytes are
  those of the choice without the space before it. `chance` is the mean of one over the number of
  choices.

  Raises:
    DataError: a file is unreadable or of another format.
    ValueError: a row is longer than the model's cache holds.
  """

  def table_row(rows):
    pairs = [_pairs(row) for row in rows]
    every = [pair for options in pairs for pair in options]
    found = iter(texts.scores(loaded.model, loaded.tokenizer, every, batch=batch))
    right, per_character, per_byte, chances = [], [], [], []
    for row, options in zip(rows, pairs, strict=True):
      totals = np.array([next(found).total for _ in options])
      plain = [text.removeprefix(" ") for _, text in options]
      characters = np.array([len(text) or 1 for text in plain])
      sizes = np.array([len(text.encode()) or 1 for text in plain])
      right.append(int(np.argmax(totals)) == row["gold"])
      per_character.append(int(np.argmax(totals / characters)) == row["gold"])
      per_byte.append(int(np.argmax(totals / sizes)) == row["gold"])
      chances.append(1 / len(options))
    return {
      "accuracy": float(np.mean(right)),
      "accuracy_per_character": float(np.mean(per_character)),
      "accuracy_per_byte": float(np.mean(per_byte)),
      "chance": float(np.mean(chances)),
    }

  return _report("choice", loaded, paths, limit, _check_choice, table_row)


def cloze(
  loaded: LoadedModel, paths: Sequence[str], *, limit: int | None = None, batch: int = 8
) -> Report:
  """Share of continuations that greedy generation gives, and their perplexity per continuation.

  Raises:
    DataError, ValueError: as `choice`.
  """

  def table_row(rows):
    pairs = [_joined(row["context"], row["continuation"]) for row in rows]
    found = texts.scores(loaded.model, loaded.tokenizer, pairs, batch=batch)
    return {
      "accuracy": float(np.mean([score.likeliest.all() for score in found])),
      "perplexity": float(np.exp(-np.mean([score.total for score in found]))),
    }

  return _report("cloze", loaded, paths, limit, _check_cloze, table_row)


def _report(
  name: str,
  loaded: LoadedModel,
  paths: Sequence[str],
  limit: int | None,
  wrong: Callable[[dict[str, Any]], str | None],
  table_row: Callable[[list[dict[str, Any]]], dict[str, Any]],
) -> Report:
  table = []
  for source in paths:
    for path, rows in read_samples(source, wrong, limit):
      table.append({"set": Path(path).name.split(".")[0], "rows": len(rows)} | table_row(rows))
  settings = {"model": str(loaded.source), "step": loaded.step, "limit": limit}
  return Report(name, settings, {"sets": table})


def _pairs(row: dict[str, Any]) -> list[tuple[str, str]]:
  if "choices" in row:
    return [_joined(row["query"], text) for text in row["choices"]]
  return [_joined(context, row["continuation"]) for context in row["context_options"]]


def _joined(context: str, text: str) -> tuple[str, str]:
  return context, text if context[-1:].isspace() else f" {text}"


def _check_choice(row: dict[str, Any]) -> str | None:
  query, options = row.get("query"), row.get("choices")
  if "context_options" in row:
    query, options = row.get("continuation"), row["context_options"]
  strings = isinstance(options, list) and all(isinstance(text, str) and text for text in options)
  gold = row.get("gold")
  if not (isinstance(query, str) and query and strings and len(options or ()) > 1):
    return (
      '"query" and a list "choices", or "continuation" and a list "context_options", of two texts'
      " or more, and no text empty"
    )
  if type(gold) is not int or not 0 <= gold < len(options):
    return f'a "gold" of 0 to {len(options) - 1}, the number of the right choice'
  return None


def _check_cloze(row: dict[str, Any]) -> str | None:
  texts_of = (row.get("context"), row.get("continuation"))
  given = all(isinstance(x, str) and x for x in texts_of)
  return None if given else 'texts "context" and "continuation", neither of them empty'
