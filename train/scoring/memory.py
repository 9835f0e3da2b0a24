"""The law of scores and the states of a model's layers, for a text.

The equations are those of `lnssm_jax.analysis`: scores without decay and normalizer (LNSSM, figures
7 and 8), singular-value entropy, cosines of rows and receptive fields of states (the SSE paper's
analysis of states).
"""

import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from lnssm_jax import analysis
from lnssm_jax.pretrained.loaded import LoadedModel
from lnssm_jax.pretrained.tokenizers import encode_whole
from train.data.errors import DataError
from train.data.sources import read_documents
from train.scoring.report import Report, Row

EDGES = np.logspace(-7, 0, 15)  # of the histogram of weights


def scores(loaded: LoadedModel, source: str, *, length: int = 256, rows: int = 4) -> Report:
  """The law of the scores of each layer and head, and a histogram of each layer's weights.

  `distance` is the largest difference between a distribution function and that of the normal law of
  the same mean and deviation, of the scores and of their logarithms; the smaller one says which of
  the two laws is nearer. Laws of logarithms are missing where a score is negative. `draw` of the
  report draws the maps of the first text and the histograms of log scores, by layer.

  Args:
    length, rows: tokens of a document that count, and documents that have as many.

  Raises:
    DataError: the text has too few documents of that length.
    ValueError: no layer has queries and keys, or the model's cache does not hold `length` tokens.
  """
  tokens = jnp.asarray(beginnings(loaded, source, length, rows))
  table, histogram, found, missing = [], [], {}, ""
  for layer in range(loaded.model.num_layers):
    try:
      found[layer] = each = analysis.scores(loaded.model, tokens, layer=layer)
    except NotImplementedError as error:
      missing = str(error)
      continue
    raw, log = analysis.score_laws(each)
    for head in range(len(raw.mean)):
      table.append({"layer": layer, "head": head} | _law(raw, head, "") | _law(log, head, "log "))
    weights = each.weights()
    counts = np.asarray(analysis.histogram(weights, jnp.asarray(EDGES), each.visible)).sum(axis=0)
    share = counts.reshape(-1, len(EDGES) - 1).sum(axis=0) / max(counts.sum(), 1)
    histogram += [
      {"layer": layer, "from": float(low), "to": float(high), "share": float(value)}
      for low, high, value in zip(EDGES, EDGES[1:], share, strict=False)
    ]
  if not found:
    raise ValueError(f"no layer of {loaded.source} has scores: {missing}")
  settings, draw = _settings(loaded, source, length, rows), functools.partial(_draw, found)
  return Report("scores", settings, {"laws": table}, {"weights": histogram}, draw)


def states(loaded: LoadedModel, source: str, *, length: int = 512, rows: int = 4) -> Report:
  """The states of each layer after `length` tokens, and its receptive field at the last 128.

  Means over documents and heads: the singular-value entropy (0: rank 1, 1: equal values), the
  effective rank, and the absolute cosine of two different rows. Of the receptive field, the median
  and the largest over channels and tokens.

  Raises:
    DataError: the text has too few documents of that length.
    ValueError: no layer has a recurrent state, or the model's cache does not hold the tokens.
  """
  tokens = beginnings(loaded, source, length, rows)
  found = analysis.document_states(loaded.model, list(tokens))
  if not any(found):
    raise ValueError(f"no layer of {loaded.source} has a recurrent state; attention keeps a cache.")
  table: list[Row] = []
  for layer, matrices in enumerate(found):
    for name, matrix in matrices.items():
      size = matrix.shape[-2]
      cosine = np.abs(np.asarray(analysis.row_cosine(matrix)))
      others = (cosine.sum(axis=(-2, -1)) - np.trace(cosine, axis1=-2, axis2=-1)).mean()
      table.append(
        {
          "layer": layer,
          "state": name,
          "rows": size,
          "columns": matrix.shape[-1],
          "entropy": float(analysis.singular_value_entropy(matrix).mean()),
          "rank": float(analysis.effective_rank(matrix).mean()),
          "cosine": float(others / (size * (size - 1))) if size > 1 else None,
        }
      )
  try:
    fields = analysis.receptive_fields(loaded.model, jnp.asarray(tokens))
  except NotImplementedError:  # no layer forgets by a decay
    fields = []
  forgetting = [
    {"layer": layer, "median": float(np.median(field)), "largest": int(np.max(field))}
    for layer, field in enumerate(fields)
    if field is not None
  ]
  tables = {"states": table} | ({"receptive field": forgetting} if forgetting else {})
  return Report("states", _settings(loaded, source, length, rows), tables)


def beginnings(loaded: LoadedModel, source: str, length: int, rows: int) -> np.ndarray:
  """[rows, length] int32: the beginnings of the first documents that are long enough.

  Raises:
    DataError: the text has too few of them.
  """
  found = []
  for document in read_documents(source):
    tokens = encode_whole(loaded.tokenizer, document, "text")
    if len(tokens) >= length:
      found.append(tokens[:length])
    if len(found) == rows:
      return np.stack(found)
  raise DataError(
    f"{source} has {len(found)} documents of at least {length} tokens, less than {rows}; use more"
    " text, or smaller --length or --rows."
  )


def _law(law: analysis.Law, head: int, prefix: str) -> dict[str, float | None]:
  values = {name: float(getattr(law, name)[head]) for name in ("mean", "deviation", "distance")}
  return {f"{prefix}{name}": x if np.isfinite(x) else None for name, x in values.items()}


def _settings(loaded: LoadedModel, source: str, length: int, rows: int) -> dict[str, Any]:
  settings = {"model": str(loaded.source), "step": loaded.step, "set": source}
  return settings | {"length": length, "rows": rows}


def _draw(found: dict[int, analysis.Scores], path: Path) -> None:
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  size = (8, 3.2 * len(found))
  figure, grid = plt.subplots(len(found), 2, figsize=size, squeeze=False, layout="constrained")
  for (layer, each), (left, right) in zip(found.items(), grid, strict=True):
    analysis.plots.score_map(each, axes=left)
    analysis.plots.score_histogram(each, axes=right)
    left.set_title(f"layer {layer}, head 0")
  figure.savefig(path, dpi=110)
  plt.close(figure)
