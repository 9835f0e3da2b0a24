"""The recurrence one token at a time, as mathematics writes it: the oracle, in float64."""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.elementwise_decay_scan.types import ElementwiseDecayState, Inputs, Options


def reference(inputs: Inputs, options: Options) -> tuple[jax.Array, ElementwiseDecayState]:
  """A `lax.scan` over time. It computes the decay of one token at a time."""
  del options
  q, k, v, log_decay, weight, state, segments = inputs
  dtype = state.kv.dtype
  first = None if segments is None else segments.first()

  def step(kv, inputs):
    q_t, k_t, v_t, decay_t, first_t = inputs
    one_token = jax.tree.map(lambda x: x[:, None], decay_t)
    a_t = jnp.exp(log_decay.make(one_token, log_decay.parameters)[:, 0].astype(dtype))
    if first_t is not None:
      kv = jnp.where(first_t[:, None, None, None], 0.0, kv)
    kv = a_t * kv + k_t[..., :, None] * v_t[..., None, :]
    read = kv if weight is None else weight.astype(dtype) * kv
    return kv, jnp.einsum("bhk,bhkv->bhv", q_t, read, precision="highest")

  arrays = (q.astype(dtype), k.astype(dtype), v.astype(dtype), log_decay.steps, first)
  by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), arrays)
  kv, out = jax.lax.scan(step, state.kv, by_time)
  return jnp.moveaxis(out, 0, 1).astype(v.dtype), ElementwiseDecayState(kv)
