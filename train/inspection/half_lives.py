"""Half-lives of a model's state for a report: the one part of it that builds the model."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from lnssm_jax.files.reading import DataError

_ENDLESS = 1e6  # tokens; longer half-lives are drawn as this


def half_lives(folder: str | Path, step: int | None, text: str) -> list[dict[str, Any]]:
  """Half-lives in tokens by layer: the shortest, median and longest channel; None is endless.

  `quantiles` has [share of channels in percent, half-life]; `channels` is 0 for a layer without
  decay; `slowest_head` is the head with the largest median.

  Args:
    text: what the model reads, where decays are data-dependent; "" for constant decays.

  Raises:
    DataError: `text` is "" and the decays are data-dependent, no layer has a decay, or the
      tokenizer is missing.
    ValueError, CheckpointError: as of `train.load_model`.
  """
  import jax.numpy as jnp

  from lnssm_jax import analysis
  from lnssm_jax.pretrained.tokenizers import encode_whole
  from train.runs.loading import load_model

  loaded = load_model(folder, step=step)
  tokens = jnp.asarray(encode_whole(loaded.tokenizer, text))[None] if text else None
  try:
    lives = analysis.half_lives(loaded.model, tokens)
  except NotImplementedError as error:
    raise DataError(f"{folder}: {error}") from error
  except ValueError as error:
    if text:
      raise
    raise DataError(f"{error} Give a text that the model reads: --half-lives TEXT.") from error
  mixers = [type(loaded.model.layer(n).mixer).__name__ for n in range(len(lives))]
  return [_row(n, *pair) for n, pair in enumerate(zip(mixers, lives, strict=True))]


def _row(layer: int, mixer: str, lives: Any) -> dict[str, Any]:
  row = {"layer": layer, "mixer": mixer, "channels": 0 if lives is None else int(lives.size)}
  if lives is None:
    return row | dict.fromkeys(("shortest", "median", "longest", "slowest_head"))
  heads = np.asarray(lives, np.float64).reshape(len(lives), -1)
  shown = lambda life: float(life) if math.isfinite(life) else None
  percent = np.arange(0, 101, 5)
  points = np.percentile(np.minimum(heads, _ENDLESS), percent)
  return row | {
    "shortest": shown(heads.min()),
    "median": shown(np.median(heads)),
    "longest": shown(heads.max()),
    "slowest_head": int(np.argmax(np.median(heads, axis=1))),
    "quantiles": [[int(p), float(life)] for p, life in zip(percent, points, strict=True)],
  }
