"""Linear attention one token at a time, as mathematics writes it, and as an associative scan."""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.precision import accumulation_dtype, decayed
from lnssm_jax.ops.core.segments import Segments
from lnssm_jax.ops.linear_attention.types import Inputs, LinearAttentionState, Options


def reference(inputs: Inputs, options: Options) -> tuple[jax.Array, LinearAttentionState]:
  """A `lax.scan` over time. The oracle: run it in float64."""
  q, k, v, log_decay, value_log_decay, bonus, state, segments, _ = inputs
  acc = accumulation_dtype(q, k, v)
  keep = _keep(segments, q.shape, acc)
  own = _own_weight(inputs, q.shape, acc)
  decay, value_decay = _decays(log_decay, value_log_decay, q.shape, v.shape, acc)

  def step(carry, inputs):
    kv, key_sum = carry
    q_t, k_t, v_t, a_t, c_t, keep_t, own_t = inputs
    kv, key_sum = jnp.where(keep_t[..., None], kv, 0.0), jnp.where(keep_t, key_sum, 0.0)
    write = k_t[..., :, None] * v_t[..., None, :]
    kv_decayed, key_sum_decayed = a_t[..., :, None] * kv * c_t[..., None, :], a_t * key_sum
    kv_next, key_sum_next = kv_decayed + write, key_sum_decayed + k_t
    if bonus is None:
      kv_read = kv_decayed + own_t[..., None] * write
      key_sum_read = key_sum_decayed + own_t * k_t
    else:
      u = bonus.astype(acc)
      kv_read, key_sum_read = kv + u[:, :, None] * write, key_sum + u * k_t
    y_t = options.scale * jnp.einsum("bhk,bhkv->bhv", q_t, kv_read, precision="highest")
    if options.normalize:
      y_t = y_t / jnp.sum(q_t * key_sum_read, axis=-1, keepdims=True)
    return (kv_next, key_sum_next), y_t

  by_time = [jnp.moveaxis(x, 1, 0) for x in (*_cast(acc, q, k, v), decay, value_decay, keep, own)]
  (kv, key_sum), out = jax.lax.scan(step, _cast(acc, *state), by_time)
  return jnp.moveaxis(out, 0, 1).astype(v.dtype), LinearAttentionState(
    kv, key_sum if options.normalize else None
  )


def associative(inputs: Inputs, options: Options) -> tuple[jax.Array, LinearAttentionState]:
  """`jax.lax.associative_scan` over (decay, k v^T): depth log T, but memory [B, T, H, K, V]."""
  q, k, v, log_decay, value_log_decay, bonus, state, segments, _ = inputs
  acc = accumulation_dtype(q, k, v)
  keep = _keep(segments, q.shape, acc)
  own = _own_weight(inputs, q.shape, acc)
  out_dtype = v.dtype
  q, k, v = _cast(acc, q, k, v)
  kv_0, key_sum_0 = _cast(acc, *state)

  # A document's first token forgets everything before it.
  log_decay = jnp.broadcast_to(log_decay.astype(acc), q.shape)
  log_decay = jnp.where(keep == 0, -jnp.inf, log_decay)
  kv_log_decay = log_decay[..., :, None]
  if value_log_decay is not None:
    kv_log_decay = kv_log_decay + value_log_decay.astype(acc)[..., None, :]

  def combine(left, right):
    return tuple(
      (g_left + g_right, decayed(g_right, x_left) + x_right)
      for (g_left, x_left), (g_right, x_right) in zip(left, right, strict=True)
    )

  kv = k[..., :, None] * v[..., None, :]
  leaves = ((jnp.broadcast_to(kv_log_decay, kv.shape), kv), (log_decay, k))
  (kv_log_decay, kv), (log_decay, key_sum) = jax.lax.associative_scan(combine, leaves, axis=1)
  kv = kv + decayed(kv_log_decay, kv_0[:, None])
  key_sum = key_sum + decayed(log_decay, key_sum_0[:, None])

  if bonus is None:
    kv_read, key_sum_read = kv, key_sum
    if inputs.own_weight is not None:
      kv_read = kv + ((own - 1) * k)[..., :, None] * v[..., None, :]
      key_sum_read = key_sum + (own - 1) * k
  else:
    u = bonus.astype(acc)
    before = lambda first, x: jnp.concatenate([first[:, None], x[:, :-1]], axis=1)
    kv_read = before(kv_0, kv) * keep[..., None] + (u * k)[..., :, None] * v[..., None, :]
    key_sum_read = before(key_sum_0, key_sum) * keep + u * k
  out = options.scale * jnp.einsum("bthk,bthkv->bthv", q, kv_read, precision="highest")
  if options.normalize:
    out = out / jnp.sum(q * key_sum_read, axis=-1, keepdims=True)
  return out.astype(out_dtype), LinearAttentionState(
    kv[:, -1], key_sum[:, -1] if options.normalize else None
  )


def _cast(dtype, *arrays):
  return tuple(x.astype(dtype) for x in arrays)


def _decays(log_decay, value_log_decay, key_shape, value_shape, dtype):
  """exp of both, [B, T, H, K] and [B, T, H, V]."""
  value_log_decay = jnp.zeros((), dtype) if value_log_decay is None else value_log_decay
  return (
    jnp.broadcast_to(jnp.exp(log_decay.astype(dtype)), key_shape),
    jnp.broadcast_to(jnp.exp(value_log_decay.astype(dtype)), value_shape),
  )


def _own_weight(inputs: Inputs, key_shape, dtype):
  """[B, T, H, 1], by which a token's output weights the token itself."""
  if inputs.own_weight is None:
    return jnp.ones((*key_shape[:3], 1), dtype)
  return inputs.own_weight[..., None].astype(dtype)


def _keep(segments: Segments | None, key_shape, dtype):
  """[B, T, 1, 1]: 0 where the state is reset before a token, else 1."""
  keep = jnp.ones(key_shape[:2], bool) if segments is None else ~segments.first()
  return keep.astype(dtype)[:, :, None, None]
