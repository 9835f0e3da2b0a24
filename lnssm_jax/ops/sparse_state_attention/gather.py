"""One step at a time: take the states that a step uses, update and read them, put them back.

This is the form for decoding, and the oracle. All forms take the arguments that `api.py` has
checked:
  q [B, T, H, K]; k [B, T, S|1, H, K]; v [B, T, S|1, H, V]; indices [B, T, S] int32, N or more where
  nothing is selected; write and read [B, T, S], the gates; log_decay [B|1, T|1, S|1, H, K|1] or
  None; state; segments [B, T] int32 counting from 0, or None.
`out` is returned before it is rounded to the dtype of v.
"""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.checks import accumulation_dtype, first_of_segment
from lnssm_jax.ops.decays import decayed
from lnssm_jax.ops.sparse_state_attention.state import SparseState


def gather(q, k, v, indices, write, read, log_decay, state, segments, *, scale):
  """Cost and memory per step are those of S states, whatever N; autodiff keeps S states a step."""
  B, T = indices.shape[:2]
  acc = accumulation_dtype(q, k, v)
  selected = indices < state.kv.shape[1]
  write, read = (jnp.where(selected, gate.astype(acc), 0.0) for gate in (write, read))
  if log_decay is None:
    log_decay = jnp.zeros((1, 1, 1, 1, 1), acc)
  log_decay = jnp.broadcast_to(log_decay, (B, T, *log_decay.shape[2:]))

  def step(kv, inputs):
    q_t, k_t, v_t, index_t, write_t, read_t, log_decay_t, begins_t = inputs
    if begins_t is not None:
      kv = jnp.where(begins_t[:, None, None, None, None], 0.0, kv)
    keys = write_t[..., None, None] * k_t.astype(acc)
    chosen = decayed(log_decay_t[..., None], _take(kv, index_t))
    chosen = chosen + keys[..., None] * v_t.astype(acc)[..., None, :]
    queries = read_t[..., None, None] * q_t.astype(acc)[:, None]
    out_t = scale * jnp.einsum("bshk,bshkv->bhv", queries, chosen, precision="highest")
    return _put(kv, index_t, chosen), out_t

  by_step = (q, k, v, indices, write, read, log_decay)
  if T == 1:
    kv, out = step(state.kv, (*(x[:, 0] for x in by_step), None))
    return out[:, None], SparseState(kv)
  arrays = (*by_step, first_of_segment(segments))
  kv, out = jax.lax.scan(step, state.kv, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), arrays))
  return jnp.moveaxis(out, 0, 1), SparseState(kv)


@jax.vmap
def _take(kv, index):
  """[N, H, K, V] and [S] -> [S, H, K, V], zeros where the index is N or more."""
  return kv.at[index].get(mode="fill", fill_value=0)


@jax.vmap
def _put(kv, index, chosen):
  return kv.at[index].set(chosen, mode="drop")
