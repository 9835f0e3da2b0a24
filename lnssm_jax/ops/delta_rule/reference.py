"""The delta rule one step at a time, as mathematics writes it.

Takes the arguments that `api.py` has checked:
  q, k, erase_key [B, T, H, K]; v [B, T, H, V]; beta [B, T, H, 1 or V]; log_decay [B, T, H]; state;
  segments [B, T] int32 counting from 0, or None.
"""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.checks import accumulation_dtype, first_of_segment
from lnssm_jax.ops.delta_rule.state import DeltaRuleState


def reference(q, k, v, beta, log_decay, erase_key, state, segments, *, scale, chunk_size=None):
  """A `lax.scan` over time. The oracle: run it in float64."""
  del chunk_size
  acc = accumulation_dtype(q, k, v)
  first = jnp.zeros(q.shape[:2], bool) if segments is None else first_of_segment(segments)

  def step(kv, inputs):
    q_t, k_t, erase_t, v_t, beta_t, a_t, first_t = inputs
    kv = a_t[..., None, None] * jnp.where(first_t[:, None, None, None], 0.0, kv)
    old = jnp.einsum("bhk,bhkv->bhv", erase_t, kv, precision="highest")
    kv = kv + k_t[..., :, None] * (beta_t * (v_t - old))[..., None, :]
    return kv, scale * jnp.einsum("bhk,bhkv->bhv", q_t, kv, precision="highest")

  arrays = (*(x.astype(acc) for x in (q, k, erase_key, v, beta)), jnp.exp(log_decay), first)
  kv, out = jax.lax.scan(step, state.kv, tuple(jnp.moveaxis(x, 1, 0) for x in arrays))
  return jnp.moveaxis(out, 0, 1).astype(v.dtype), DeltaRuleState(kv)
