"""Linear attention inside its chunks, for all chunks at once; `xla.py` connects them.

Shapes are `[N, B, H, C, X]`: N chunks of C steps. Decays may have size 1 on any axis but H and C.

A pair of steps i > j of one chunk is weighted by the decays of the steps between them. Blocks of 1,
2, 4, ... steps are merged two by two: every pair meets at exactly one merge, where j is in the
first half and i in the second. There the weight splits at the border between the halves into
exp(sum from the border to i) * exp(sum from j to the border): both sums have terms of one sign,
both factors are at most 1, and the scores of the merge are one matrix product.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.ops.chunks import Segments
from lnssm_jax.ops.decays import decayed
from lnssm_jax.ops.products import product

# Products of blocks below this size are cheaper as multiply-and-sum than as calls of a
# matrix-product library.
_SMALLEST_MATRIX_PRODUCT = 4


class Chunks(NamedTuple):
  """The inputs, cut into chunks."""

  q: jax.Array  # [N, B, H, C, K]
  k: jax.Array  # [N, B, H, C, K]
  v: jax.Array  # [N, B, H, C, V]
  log_decay: jax.Array  # [N|1, B|1, H|1, C, K|1]
  value_log_decay: jax.Array | None  # [N|1, B|1, H, C, V]
  bonus: jax.Array | None  # [H, 1, K]


class State(NamedTuple):
  """One state per chunk."""

  kv: jax.Array  # [N, B, H, K, V]
  key_sum: jax.Array | None  # [N, B, H, K]


class Summary(NamedTuple):
  """What a chunk does to the state: S -> diag(decay) S diag(value decay) + added."""

  log_decay: jax.Array  # [N|1, B|1, H|1, K|1]
  value_log_decay: jax.Array | None  # [N|1, B|1, H, V]
  added: State


def advance(summary: Summary, state: State) -> State:
  """The state after a chunk, from the state before it."""
  kv = decayed(summary.log_decay[..., :, None], state.kv)
  if summary.value_log_decay is not None:
    kv = decayed(summary.value_log_decay[..., None, :], kv)
  key_sum = state.key_sum
  if key_sum is not None:
    key_sum = decayed(summary.log_decay, key_sum) + summary.added.key_sum
  return State(kv + summary.added.kv, key_sum)


def summarize(chunks: Chunks, segments: Segments | None, normalize: bool) -> Summary:
  """The effect of each chunk on the state. `added.key_sum` is None unless `normalize`."""
  sums = _whole_chunk(chunks.log_decay)
  keys = chunks.k * jnp.exp(sums.after)
  values = chunks.v
  log_decay, value_log_decay = sums.total[..., 0, :], None
  if segments is not None:
    keys = jnp.where((segments.step == segments.leaving)[..., None], keys, 0.0)
    log_decay = jnp.where(segments.entering == segments.leaving, log_decay, -jnp.inf)
  if chunks.value_log_decay is not None:
    value_sums = _whole_chunk(chunks.value_log_decay)
    values = values * jnp.exp(value_sums.after)
    value_log_decay = value_sums.total[..., 0, :]
  added = product("...ck,...cv->...kv", keys, values, chunks.v.dtype)
  return Summary(log_decay, value_log_decay, State(added, keys.sum(-2) if normalize else None))


def outputs(chunks: Chunks, segments: Segments | None, entering: State, normalize: bool):
  """Returns S_t^T q_t [N, B, H, C, V] and, if `normalize`, q_t^T z_t [N, B, H, C], else None."""
  before = _whole_chunk(chunks.log_decay, read_first=chunks.bonus is not None).before
  queries = chunks.q * jnp.exp(before)
  if segments is not None:
    queries = jnp.where((segments.step == segments.entering)[..., None], queries, 0.0)
  dtype = chunks.v.dtype
  from_state = product("...ck,...kv->...cv", queries, entering.kv, dtype)
  if chunks.value_log_decay is not None:
    from_state = from_state * jnp.exp(
      _whole_chunk(chunks.value_log_decay, read_first=chunks.bonus is not None).before
    )
    return from_state + _outputs_with_value_decay(chunks, segments), None
  scores = _scores(chunks)
  if segments is not None:
    same = segments.step[..., :, None] == segments.step[..., None, :]
    scores = jnp.where(same, scores, 0.0)
  out = from_state + product("...ij,...jv->...iv", scores, chunks.v, dtype)
  if not normalize:
    return out, None
  from_sum = jnp.sum(queries * entering.key_sum[..., None, :], axis=-1)
  return out, from_sum + scores.sum(-1)


class _Sums(NamedTuple):
  """Sums of log decays inside blocks of s steps, [..., C/s, s, X] (`total`: [..., C/s, 1, X])."""

  before: jax.Array  # from the block's start up to the read of step i
  after: jax.Array  # of the steps after j to the block's end
  total: jax.Array

  @classmethod
  def of_steps(cls, log_decay, read_first):
    steps = log_decay[..., :, None, :]
    return cls(jnp.zeros_like(steps) if read_first else steps, jnp.zeros_like(steps), steps)

  def merged(self):
    (before_1, before_2), (after_1, after_2) = _halves(self.before), _halves(self.after)
    total_1, total_2 = _halves(self.total)
    return _Sums(
      jnp.concatenate([before_1, total_1 + before_2], axis=-2),
      jnp.concatenate([after_1 + total_2, after_2], axis=-2),
      total_1 + total_2,
    )


def _whole_chunk(log_decay, *, read_first=False) -> _Sums:
  """The sums over whole chunks, [..., C, X]."""
  sums = _Sums.of_steps(log_decay, read_first)
  while sums.before.shape[-3] > 1:
    sums = sums.merged()
  return _Sums(*(x[..., 0, :, :] for x in sums))


def _scores(chunks: Chunks) -> jax.Array:
  """[N, B, H, C, C]: the weight of step j in the output of step i, zero for j > i."""
  q, k, v, log_decay, _, bonus = chunks
  size, length = 1, q.shape[-2]
  sums = _Sums.of_steps(log_decay, bonus is not None)
  per_channel = log_decay.shape[-1] > 1
  if per_channel:
    table = _same_step_scores(q, k, bonus)[
      ..., None, None
    ]  # [..., C/s, s, s]: the scores inside each block
  else:
    table = jnp.zeros_like(sums.total)  # the log of the scores' weights, the same for all channels
  while size < length:
    before_2, after_1 = _halves(sums.before)[1], _halves(sums.after)[0]
    if per_channel:
      cross = _cross_scores(_blocks(q, size), _blocks(k, size), before_2, after_1, v.dtype)
    else:
      cross = before_2 + jnp.swapaxes(after_1, -1, -2)
    first, second = _halves(table)
    above = jnp.full_like(first, 0.0 if per_channel else -jnp.inf)
    table = jnp.concatenate(
      [jnp.concatenate([first, above], -1), jnp.concatenate([cross, second], -1)], -2
    )
    sums, size = sums.merged(), 2 * size
  table = table[..., 0, :, :]
  if per_channel:
    return table
  scores = product("...ik,...jk->...ij", q, k, v.dtype) * jnp.exp(table)
  if bonus is None:
    return scores
  diagonal = jnp.eye(length, dtype=bool)
  return jnp.where(diagonal, _same_step_scores(q, k, bonus)[..., None], scores)


def _outputs_with_value_decay(chunks: Chunks, segments: Segments | None) -> jax.Array:
  """[N, B, H, C, V]: the outputs of each chunk without what entered it, when values decay too."""
  q, k, v, log_decay, value_log_decay, bonus = chunks
  size, length = 1, q.shape[-2]
  sums = _Sums.of_steps(log_decay, bonus is not None)
  value_sums = _Sums.of_steps(value_log_decay, bonus is not None)
  out = (_same_step_scores(q, k, bonus)[..., None] * v)[..., None, :]  # [..., C/s, s, V]
  while size < length:
    cross = _cross_scores(
      _blocks(q, size), _blocks(k, size), _halves(sums.before)[1], _halves(sums.after)[0], v.dtype
    )
    if segments is not None:
      step_1, step_2 = _halves(_blocks(segments.step[..., None], size))
      cross = jnp.where(step_2 == jnp.swapaxes(step_1, -1, -2), cross, 0.0)
    values = _halves(_blocks(v, size))[0] * jnp.exp(_halves(value_sums.after)[0])
    carried = product("...ij,...jv->...iv", cross, values, v.dtype)
    first, second = _halves(out)
    out = jnp.concatenate([first, second + jnp.exp(_halves(value_sums.before)[1]) * carried], -2)
    sums, value_sums, size = sums.merged(), value_sums.merged(), 2 * size
  return out[..., 0, :, :]


def _same_step_scores(q, k, bonus):
  """[N, B, H, C]: q_i k_i, weighted by the bonus if there is one."""
  weight = 1.0 if bonus is None else bonus
  return jnp.sum(q * weight * k, axis=-1, dtype=jnp.result_type(jnp.float32, q.dtype))


def _cross_scores(q, k, before_2, after_1, dtype):
  """[..., C/2s, s, s]: the scores of each second half against its first half."""
  queries, keys = _halves(q)[1] * jnp.exp(before_2), _halves(k)[0] * jnp.exp(after_1)
  if q.shape[-2] < _SMALLEST_MATRIX_PRODUCT:
    return jnp.sum(queries[..., :, None, :] * keys[..., None, :, :], axis=-1)
  return product("...ik,...jk->...ij", queries, keys, dtype)


def _blocks(x, size):
  """[..., C, X] -> [..., C/size, size, X]."""
  return x.reshape(*x.shape[:-2], x.shape[-2] // size, size, x.shape[-1])


def _halves(blocks):
  """[..., M, s, X] -> the even and the odd blocks, [..., M/2, s, X] each."""
  return blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
