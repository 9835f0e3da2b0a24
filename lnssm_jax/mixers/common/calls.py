"""Calls without an axis of batch or time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lnssm_jax.mixers.base import Mixer

# A mixer, a language model, or a bound Linen face of one: (x, state, segment ids) -> (y, state).
type Layer = Callable[..., tuple[jax.Array, Any]]


def step(
  layer: Layer, x: jax.Array, state: Any = None, *, reset: jax.Array | None = None
) -> tuple[jax.Array, Any]:
  """Reads one token of each sequence: x [B, D], of a language model tokens [B].

      y, state = mixers.step(mixer, x, state, reset=done)

  Args:
    reset: [B] bool, rows whose sequence begins with this token, such as the `done` flags of the
      step before in reinforcement learning. Their state is the empty one, whatever it holds.

  Returns:
    (y [B, D], of a language model logits [B, vocab]; the state after the token).

  Raises:
    ValueError: x has another number of axes, `reset` another shape or dtype; or as the call of
      `layer`.
  """
  _check("step", x, "B", "one token of each sequence")
  if reset is not None:
    reset = jnp.asarray(reset)
    if reset.shape != x.shape[:1] or reset.dtype != bool:
      raise ValueError(
        f"step: reset is {reset.dtype} {list(reset.shape)}, but bool [{len(x)}] is needed: one for"
        " each row."
      )
    if state is not None:
      state = _emptied(layer, state, reset)
  y, state = layer(x[:, None], state)
  return y[:, 0], state


def _emptied(layer: Any, state: Any, reset: jax.Array) -> Any:
  """The state, empty in the rows of `reset`: of a mixer rows come first, of a model layers."""
  axis = 0 if issubclass(getattr(layer, "wrapped", type(layer)), Mixer) else 1
  rows = lambda leaf: jnp.expand_dims(reset, [n for n in range(leaf.ndim) if n != axis])
  choose = lambda old, new: jnp.where(rows(old), new, old)
  return jax.tree.map(choose, state, layer.init_state(len(reset)))


def single(
  layer: Layer, x: jax.Array, state: Any = None, segment_ids: jax.Array | None = None
) -> tuple[jax.Array, Any]:
  """Reads one sequence: x [T, D], of a language model tokens [T]; `segment_ids` [T].

      y, state = mixers.single(mixer, x)

  Returns:
    (y [T, D], of a language model logits [T, vocab]; the state, that of a batch of one).

  Raises:
    ValueError: x has another number of axes; or as the call of `layer`.
  """
  _check("single", x, "T", "one sequence")
  y, state = layer(x[None], state, None if segment_ids is None else segment_ids[None])
  return y[0], state


def _check(name: str, x: jax.Array, axis: str, meaning: str) -> None:
  tokens = jnp.issubdtype(jnp.result_type(x), jnp.integer)
  if jnp.ndim(x) != (1 if tokens else 2):
    axes = f"[{axis}] of tokens" if tokens else f"[{axis}, D]"
    raise ValueError(f"{name}: x has shape {jnp.shape(x)}, but {meaning} is {axes}.")
