"""How well a model predicts text: by corpus, document and position, and beyond its training length.

The first token of a document has no probability and is not counted; what the tokenizer puts before
every text, such as BOS, is read and not counted. Bits per byte are the mean
nats per token, times the tokens per byte of the whole text, so that tokenizers can be compared; of
a document, those of the whole document. Only `extrapolate` predicts, and so counts, end-of-text
tokens.
"""

import functools
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lnssm_jax.pretrained import texts
from lnssm_jax.pretrained.loaded import LoadedModel
from train.data.bits_per_byte import bits_per_byte
from train.data.errors import DataError
from train.data.sources import read_documents
from train.scoring.report import Report, Row

TIMES = (1, 2, 4, 8, 16, 32)


def lm(
  loaded: LoadedModel,
  sources: Sequence[str],
  *,
  length: int | None = None,
  batch: int = 8,
  key: str = "text",
) -> Report:
  """Scores each document alone; `length` cuts it to its first tokens.

  Args:
    sources: files, folders or globs, or "NAME=SOURCE", each a set in the tables of the report.
    key: of the text in rows.

  Raises:
    DataError: a source is unreadable, or has no document of two tokens.
    ValueError: a document is longer than the model's cache holds, or two sets have one name.
  """
  corpora, positions, documents = [], [], []
  for name, source in _named(sources).items():
    found, per_byte = _tokens(loaded, source, key)
    least = max(1, len(loaded.tokenizer.added.before))
    kept = [(row[:length], each) for row, each in found if len(row[:length]) > least]
    if not kept:
      raise DataError(f"{source} has no document of at least two tokens; there is none to predict.")
    rows = [row for row, _ in kept]
    first = max(1, len(loaded.tokenizer.added.before))
    scores = texts.score_tokens(loaded.model, rows, [first] * len(rows), batch=batch)
    nats = [-score.log_probs.astype(np.float64) for score in scores]
    means = [each.mean() for each in nats]
    corpora.append(
      {"set": name, "documents": len(rows)}
      | _row(np.concatenate(nats), per_byte)
      | {"document_perplexity": math.exp(np.mean(means))}
    )
    positions += [{"set": name} | row for row in _by_position(nats, per_byte)]
    documents += [
      {"set": name, "document": number} | _row(each, of_document)
      for number, (each, (_, of_document)) in enumerate(zip(nats, kept, strict=True))
    ]
  settings = {"model": str(loaded.source), "step": loaded.step, "length": length}
  tables = {"corpora": corpora, "positions": positions}
  return Report("lm", settings, tables, {"documents": documents})


def extrapolate(
  loaded: LoadedModel,
  source: str,
  *,
  train_length: int | None = None,
  times: Sequence[int] = TIMES,
  tokens: int | None = None,
  batch: int = 8,
) -> Report:
  """Scores the same text in windows of 1 to 32 times the training length.

  Documents follow each other with an end-of-text token between them, and the state is never reset;
  each window starts empty. All lengths predict the same tokens, at most `tokens` of them.
  `beyond` is the perplexity of tokens further into their window than the training length.

  Raises:
    ValueError: the training length is not known, or the model's cache holds no such window.
    DataError: the text is shorter than the longest window.
  """
  known = train_length or loaded.settings.get("seq_len")
  if known is None:
    raise ValueError(
      f"{loaded.source} does not say at which length it was trained; use --train-length N."
    )
  found, per_byte = _tokens(loaded, source)
  end = np.array([loaded.tokenizer.end_of_text], np.int32)
  stream = np.concatenate([part for row, _ in found for part in (row, end)])
  # Each document's end-of-text token is predicted, too: it counts as in the sidecars of token sets.
  around = len(found) * (1 + len(loaded.tokenizer.added.before))
  per_byte *= len(stream) / (len(stream) - around)
  longest = math.lcm(*times) * known
  room = min(len(stream) - 1, tokens or len(stream))
  count = room // longest * longest
  if not count:
    raise DataError(
      f"{source} has {room:,} tokens to predict, less than the {longest:,} that windows of"
      f" times={list(times)} fill; use more text, or smaller --times."
    )
  table = []
  for factor in times:
    length = factor * known
    windows = [stream[first : first + length + 1] for first in range(0, count, length)]
    scores = texts.score_tokens(loaded.model, windows, [1] * len(windows), batch=batch)
    nats = -np.stack([score.log_probs for score in scores]).astype(np.float64)
    beyond = math.exp(nats[:, known:].mean()) if factor > 1 else None
    table.append(
      {"length": length, "times": factor} | _row(nats.ravel(), per_byte) | {"beyond": beyond}
    )
  settings = {"model": str(loaded.source), "step": loaded.step, "set": source}
  draw = functools.partial(_draw, source, table)
  return Report("extrapolate", settings, {"lengths": table}, draw=draw)


def _draw(title: str, rows: Sequence[Row], path: Path) -> None:
  """Draws the perplexity of `extrapolate` against the length."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  figure, axis = plt.subplots(figsize=(5, 3.5), layout="constrained")
  lengths = [row["length"] for row in rows]
  axis.plot(lengths, [row["perplexity"] for row in rows], marker="o", label="all tokens")
  later = [row for row in rows if row["beyond"] is not None]
  xs, ys = [row["length"] for row in later], [row["beyond"] for row in later]
  axis.plot(xs, ys, marker="o", label="beyond the training length")
  axis.set_xscale("log", base=2)
  axis.set(xlabel="tokens in a window", ylabel="perplexity", title=title)
  axis.grid(alpha=0.3)
  axis.legend(frameon=False)
  figure.savefig(path, dpi=110)
  plt.close(figure)


def _named(sources: Sequence[str]) -> dict[str, str]:
  """Sources by the name of their set; a source that exists as it is written has no other name."""
  found: dict[str, str] = {}
  for given in sources:
    name, equals, source = given.partition("=")
    if not (equals and name and source) or os.path.exists(given):
      name, source = given, given
    if name in found:
      raise ValueError(f"two sets of text are named {name!r}; name one of them: OTHER={source}.")
    found[name] = source
  return found


def _tokens(
  loaded: LoadedModel, source: str, key: str = "text"
) -> tuple[list[tuple[np.ndarray, float]], float]:
  """The tokens of each document with their number per byte, and tokens per byte of all.

  With those before every text, which the numbers per byte leave out.
  """
  documents = list(read_documents(source, fields=(key,)))
  if not documents:
    raise DataError(f"{source} has no document that is not empty; use another file or folder.")
  rows, before = loaded.tokenizer.encode_batch(documents), loaded.tokenizer.added.before
  sizes = [len(document.encode()) for document in documents]
  per_byte = [len(row) / size for row, size in zip(rows, sizes, strict=True)]
  whole = [np.array([*before, *row], np.int32) for row in rows]
  return list(zip(whole, per_byte, strict=True)), sum(map(len, rows)) / sum(sizes)


def _row(nats: np.ndarray, tokens_per_byte: float) -> Row:
  mean = float(nats.mean())
  return {
    "tokens": nats.size,
    "nats_per_token": mean,
    "perplexity": math.exp(mean),
    "bits_per_byte": bits_per_byte(mean, tokens_per_byte),
  }


def _by_position(nats: Sequence[np.ndarray], tokens_per_byte: float) -> list[Row]:
  """A row for the tokens at positions 1, 2-3, 4-7, 8-15, ... of their documents."""
  rows, first, longest = [], 1, max(map(len, nats))
  while first <= longest:
    part = np.concatenate([each[first - 1 : 2 * first - 1] for each in nats])
    last = min(2 * first - 1, longest)
    rows.append({"from": first, "to": last} | _row(part, tokens_per_byte))
    first *= 2
  return rows
