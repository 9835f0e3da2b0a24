"""The recurrence one step at a time, as mathematics writes it: the oracle, in float64."""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.checks import first_of_segment
from lnssm_jax.ops.selective_scan.state import SelectiveState


def reference(
  x: jax.Array,  # [B, T, D]
  dt: jax.Array,  # [B, T, D]
  a: jax.Array,  # [D, N]
  b: jax.Array,  # [B, T, N]
  c: jax.Array,  # [B, T, N]
  skip: jax.Array,  # [D]
  state: SelectiveState,
  segments: jax.Array | None,  # [B, T]
  *,
  chunk_size: int | None = None,
):
  """A `lax.scan` over time."""
  del chunk_size
  first = first_of_segment(segments)

  def step(ssm, inputs):
    x_t, dt_t, b_t, c_t, first_t = inputs
    if first_t is not None:
      ssm = jnp.where(first_t[:, None, None], 0.0, ssm)
    ssm = jnp.exp(dt_t[:, :, None] * a) * ssm + (dt_t * x_t)[:, :, None] * b_t[:, None, :]
    return ssm, jnp.einsum("bdn,bn->bd", ssm, c_t, precision="highest") + skip * x_t

  wide = [z.astype(state.ssm.dtype) for z in (x, dt, b, c)]
  by_time = jax.tree.map(lambda z: jnp.moveaxis(z, 1, 0), (*wide, first))
  ssm, out = jax.lax.scan(step, state.ssm, by_time)
  return jnp.moveaxis(out, 0, 1).astype(x.dtype), SelectiveState(ssm)
