"""Figures of what `lnssm_jax.analysis` finds. They need matplotlib.

Each function draws on `axes`, or on those of a new figure, and returns them:

    axes = analysis.plots.half_lives(analysis.half_lives(model))
    axes.figure.savefig("half_lives.png")
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from lnssm_jax.analysis.score_maps import Scores
from lnssm_jax.analysis.selections import Routing
from lnssm_jax.analysis.states import Influence, Matrices

_LONGEST = 1e6  # tokens: where half-lives without end are drawn


def half_lives(lives: Sequence[jax.Array | None], axes: Any = None) -> Any:
  """The sorted half-lives of each layer's channels: one line per layer, the y axis logarithmic.

  Half-lives of more than a million tokens, and endless ones, are drawn as a million.
  """
  axes, color = _axes(axes), _colors(len(lives))
  for layer, channels in enumerate(lives):
    if channels is not None:
      ordered = np.minimum(np.sort(np.asarray(channels).ravel()), _LONGEST)
      share = (np.arange(ordered.size) + 0.5) / ordered.size
      axes.plot(share, ordered, color=color(layer), label=f"layer {layer}")
  axes.set(yscale="log", xlabel="share of channels", ylabel="half-life (tokens)")
  _round_ticks(axes.yaxis)
  _legend(axes, len(lives))
  return axes


def score_map(scores: Scores, *, row: int = 0, head: int = 0, axes: Any = None) -> Any:
  """The weights of one head for one text, each row divided by its sum, on a logarithmic scale."""
  axes = _axes(axes)
  weights = np.asarray(scores.weights()[row, head], np.float64)
  visible = np.asarray(scores.visible[row, 0]) & (weights > 0)
  with_gaps = np.where(visible, np.log10(np.where(visible, weights, 1)), np.nan)
  image = axes.imshow(with_gaps, vmin=-7, vmax=0, cmap="viridis", interpolation="none")
  axes.figure.colorbar(image, ax=axes, label="log10 of the weight")
  axes.set(xlabel="key (token)", ylabel="query (token)")
  return axes


def score_histogram(scores: Scores, *, head: int = 0, bins: int = 80, axes: Any = None) -> Any:
  """The distribution of log a_ts of one head, and the normal law of its mean and deviation."""
  axes = _axes(axes)
  seen = np.broadcast_to(np.asarray(scores.visible)[:, 0], np.asarray(scores.log[:, head]).shape)
  log = np.asarray(scores.log[:, head])[seen]
  log = log[np.isfinite(log)]
  axes.hist(log, bins=bins, density=True, color="lightsteelblue", label="log score")
  if log.size and log.std() > 0:
    x = np.linspace(log.min(), log.max(), 200)
    normal = np.exp(-0.5 * ((x - log.mean()) / log.std()) ** 2) / (log.std() * math.sqrt(2 * np.pi))
    axes.plot(x, normal, color="black", label="normal law")
  axes.set(xlabel="log score", ylabel="density")
  axes.legend()
  return axes


def state_norms(norms: Sequence[Matrices], *, every: int, axes: Any = None) -> Any:
  """The norm of each layer's recurrent states along a text: the mean over texts and heads.

  Args:
    every: as given to `analysis.state_norms`.
  """
  axes, color = _axes(axes), _colors(len(norms))
  for layer, by_name in enumerate(norms):
    for name, values in by_name.items():
      mean = np.asarray(values).mean(axis=(1, 2))
      label = f"layer {layer}" + (f", {name}" if len(by_name) > 1 else "")
      tokens = every * (1 + np.arange(len(mean)))
      axes.plot(tokens, mean, color=color(layer), marker="." if len(mean) == 1 else "", label=label)
  axes.set(yscale="log", xlabel="tokens", ylabel="norm of the state")
  _legend(axes, len(norms))
  return axes


def row_cosines(cosines: jax.Array, axes: Any = None) -> Any:
  """One matrix of `analysis.row_cosine`, [R, R]."""
  axes = _axes(axes)
  image = axes.imshow(np.asarray(cosines), vmin=-1, vmax=1, cmap="RdBu", interpolation="none")
  axes.figure.colorbar(image, ax=axes, label="cosine")
  axes.set(xlabel="row of the state", ylabel="row of the state")
  return axes


def boundary_influence(influence: Influence, axes: Any = None) -> Any:
  """The influence of a document on the tokens of the next one: the mean over texts, by layer."""
  output = np.asarray(influence.output).mean(axis=1)  # [L, T2]
  axes, color = _axes(axes), _colors(len(output))
  for layer, values in enumerate(output):
    axes.plot(np.arange(len(values)), values, color=color(layer), label=f"layer {layer}")
  if output.max() > 0:
    axes.set(yscale="log")
  axes.set(xlabel="token after the boundary", ylabel="influence of the document before")
  _legend(axes, len(output))
  return axes


def routing(found: Sequence[Routing | None], axes: Any = None) -> Any:
  """The share of tokens that select each partition: one row per layer that routes."""
  axes = _axes(axes)
  layers = [number for number, layer in enumerate(found) if layer is not None]
  share = np.stack([np.asarray(layer.share) for layer in found if layer is not None])
  image = axes.imshow(share, vmin=0, cmap="viridis", interpolation="none", aspect="auto")
  axes.figure.colorbar(image, ax=axes, label="share of tokens")
  axes.set(xlabel="partition", ylabel="layer")
  axes.set_yticks(range(len(layers)), [str(layer) for layer in layers])
  axes.set_xticks(range(share.shape[1]))
  return axes


def _round_ticks(axis: Any) -> None:
  """Plain numbers on a logarithmic axis, also where it spans less than a decade."""
  from matplotlib import ticker

  low, high = axis.get_view_interval()
  near = ticker.MaxNLocator(nbins=5, steps=(1, 2, 5, 10))
  axis.set_major_locator(near if high < 10 * low else ticker.LogLocator(subs=(1, 2, 5)))
  axis.set_major_formatter(ticker.FormatStrFormatter("%.6g"))
  axis.set_minor_locator(ticker.NullLocator())


def _axes(axes: Any) -> Any:
  if axes is not None:
    return axes
  try:
    from matplotlib import pyplot
  except ImportError as error:
    raise ImportError(
      "lnssm_jax.analysis.plots needs matplotlib: pip install matplotlib. The other functions of "
      "lnssm_jax.analysis do not."
    ) from error
  return pyplot.subplots(figsize=(6, 4), layout="constrained")[1]


def _colors(count: int) -> Any:
  """Colors from dark to bright, by layer."""
  import matplotlib

  scale = matplotlib.colormaps["viridis"]
  return lambda layer: scale(0.85 * layer / max(count - 1, 1))


def _legend(axes: Any, count: int) -> None:
  axes.legend(fontsize="small", ncols=1 + count // 9)
