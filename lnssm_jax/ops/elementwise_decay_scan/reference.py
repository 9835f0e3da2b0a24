"""The recurrence one step at a time, as mathematics writes it: the oracle, in float64."""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.checks import first_of_segment
from lnssm_jax.ops.elementwise_decay_scan.state import DecayFunction, ElementwiseDecayState


def reference(
  q: jax.Array,  # [B, T, H, K]
  k: jax.Array,  # [B, T, H, K]
  v: jax.Array,  # [B, T, H, V]
  log_decay: DecayFunction,
  state: ElementwiseDecayState,
  segments: jax.Array | None,  # [B, T]
  *,
  chunk_size: int | None = None,
):
  """A `lax.scan` over time. It makes the decay of one step at a time."""
  del chunk_size
  dtype = state.kv.dtype
  first = first_of_segment(segments)

  def step(kv, inputs):
    q_t, k_t, v_t, decay_t, first_t = inputs
    one_step = jax.tree.map(lambda x: x[:, None], decay_t)
    a_t = jnp.exp(log_decay.make(one_step, log_decay.parameters)[:, 0].astype(dtype))
    if first_t is not None:
      kv = jnp.where(first_t[:, None, None, None], 0.0, kv)
    kv = a_t * kv + k_t[..., :, None] * v_t[..., None, :]
    return kv, jnp.einsum("bhk,bhkv->bhv", q_t, kv, precision="highest")

  arrays = (q.astype(dtype), k.astype(dtype), v.astype(dtype), log_decay.steps, first)
  by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), arrays)
  kv, out = jax.lax.scan(step, state.kv, by_time)
  return jnp.moveaxis(out, 0, 1).astype(v.dtype), ElementwiseDecayState(kv)
