"""The recurrence one step at a time, as mathematics writes it: the oracle, in float64."""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.checks import first_of_segment
from lnssm_jax.ops.longhorn_scan.state import LonghornState


def reference(
  x: jax.Array,  # [B, T, D]
  beta: jax.Array,  # [B, T, D]
  k: jax.Array,  # [B, T, N]
  q: jax.Array,  # [B, T, N]
  skip: jax.Array,  # [D]
  state: LonghornState,
  segments: jax.Array | None,  # [B, T]
  *,
  chunk_size: int | None = None,
):
  """A `lax.scan` over time, with the decay as it is defined: in float32 its digits cancel."""
  del chunk_size
  first = first_of_segment(segments)

  def step(memory, inputs):
    x_t, beta_t, k_t, q_t, first_t = inputs
    if first_t is not None:
      memory = jnp.where(first_t[:, None, None], 0.0, memory)
    gain = (beta_t / (1 + beta_t * jnp.sum(k_t**2, axis=-1, keepdims=True)))[:, :, None]
    k_t = k_t[:, None, :]
    memory = (1 - gain * k_t**2) * memory + gain * x_t[:, :, None] * k_t
    return memory, jnp.einsum("bdn,bn->bd", memory, q_t, precision="highest") + skip * x_t

  wide = [z.astype(state.memory.dtype) for z in (x, beta, k, q)]
  by_time = jax.tree.map(lambda z: jnp.moveaxis(z, 1, 0), (*wide, first))
  memory, out = jax.lax.scan(step, state.memory, by_time)
  return jnp.moveaxis(out, 0, 1).astype(x.dtype), LonghornState(memory)
