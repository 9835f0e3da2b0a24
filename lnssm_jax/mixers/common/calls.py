"""Calls without an axis of batch or time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# A mixer, a language model, or a bound Linen face of one: (x, state, segment ids) -> (y, state).
type Layer = Callable[..., tuple[jax.Array, Any]]


def step(layer: Layer, x: jax.Array, state: Any = None) -> tuple[jax.Array, Any]:
  """Reads one token of each sequence: x [B, D], of a language model tokens [B].

      y, state = mixers.step(mixer, x, state)

  Returns:
    (y [B, D], of a language model logits [B, vocab]; the state after the token).

  Raises:
    ValueError: x has another number of axes; or as the call of `layer`.
  """
  _check("step", x, "B", "one token of each sequence")
  y, state = layer(x[:, None], state)
  return y[:, 0], state


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
