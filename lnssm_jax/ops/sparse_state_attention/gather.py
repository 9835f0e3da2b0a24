"""Token by token: load the states that a token uses, update and read them, store them.

This is the form for decoding, and the oracle. All methods return `out` before it is rounded to the
dtype of v.
"""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.precision import accumulation_dtype, decayed
from lnssm_jax.ops.sparse_state_attention.types import Inputs, Options, SparseState


def gather(inputs: Inputs, options: Options):
  """Cost and memory per token are those of S states, whatever N; autodiff stores S states each."""
  q, k, v, indices, write, read, log_decay, beta, state, segments = inputs
  B, T = indices.shape[:2]
  acc = accumulation_dtype(q, k, v)
  selected = indices < state.kv.shape[1]
  write, read = (jnp.where(selected, gate.astype(acc), 0.0) for gate in (write, read))
  if log_decay is None:
    log_decay = jnp.zeros((1, 1, 1, 1, 1), acc)
  log_decay = jnp.broadcast_to(log_decay, (B, T, *log_decay.shape[2:]))

  def step(kv, token):
    q_t, k_t, v_t, index_t, write_t, read_t, log_decay_t, beta_t, first_t = token
    if first_t is not None:
      kv = jnp.where(first_t[:, None, None, None, None], 0.0, kv)
    keys = write_t[..., None, None] * k_t.astype(acc)
    chosen = decayed(log_decay_t[..., None], _take(kv, index_t))
    values = v_t.astype(acc)
    if beta_t is not None:
      keys = beta_t * keys
      old = jnp.einsum("bshk,bshkv->bshv", *_together(k_t.astype(acc), chosen), precision="highest")
      values = values - old
    # Computed once: XLA may recompute it from the old states where it is read, and copy all N.
    chosen = jax.lax.optimization_barrier(chosen + keys[..., None] * values[..., None, :])
    queries = read_t[..., None, None] * q_t.astype(acc)[:, None]
    out_t = options.scale * jnp.einsum("bshk,bshkv->bhv", queries, chosen, precision="highest")
    return _put(kv, index_t, chosen), out_t

  by_token = (q, k, v, indices, write, read, log_decay, beta)
  if T == 1:
    kv, out = step(state.kv, (*jax.tree.map(lambda x: x[:, 0], by_token), None))
    return out[:, None], SparseState(kv)
  arrays = (*by_token, None if segments is None else segments.first())
  kv, out = jax.lax.scan(step, state.kv, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), arrays))
  return jnp.moveaxis(out, 0, 1), SparseState(kv)


def _together(keys, states):
  """Keys [B, S|1, H, K] for each of the states [B, S, H, K, V]."""
  return jnp.broadcast_to(keys, states.shape[:-1]), states


@jax.vmap
def _take(kv, index):
  """[N, H, K, V] and [S] -> [S, H, K, V], zeros where the index is N or more."""
  return kv.at[index].get(mode="fill", fill_value=0)


@jax.vmap
def _put(kv, index, chosen):
  return kv.at[index].set(chosen, mode="drop")
