"""Softmax attention on a divided sequence: each device fetches the keys and values before its part.

They become the key-value cache with which `ops.attention` then runs on the part alone.
"""

import functools

import jax
import jax.numpy as jnp

from lnssm_jax import ops
from lnssm_jax.ops import dispatch
from lnssm_jax.ops.attention.state import AttentionState, Rule, Steps, advance, steps_of
from lnssm_jax.ops.checks import segment_index
from lnssm_jax.ops.sequence_parallel.borders import inputs_before, of_last, step_positions
from lnssm_jax.ops.sequence_parallel.exchange import place


def attention(
  q: jax.Array,  # [B, T, H, K]
  k: jax.Array,  # [B, T, G, K]
  v: jax.Array,  # [B, T, G, V]
  *,
  axis_name: str | None,
  window: int | None = None,
  block: int | None = None,
  scale: float | None = None,
  initial_state: AttentionState | None = None,
  segment_ids: jax.Array | None = None,  # [B, T] integer
  implementation: str | None = None,
  chunk_size: int | None = None,
) -> tuple[jax.Array, AttentionState | None]:
  """Causal `ops.attention` on a divided sequence.

  With a window or blocks that reach no further back than one part, the last keys and values of the
  part before are fetched from one neighbour. Otherwise all keys and values are gathered: this
  exchange grows with T, as the work does. `initial_state` and the returned state are those of the
  whole sequence, the same on all devices.

  Raises:
    ValueError, NotImplementedError: as `ops.attention`; ValueError: `axis_name` is not a mapped
      axis.
  """
  run = functools.partial(
    ops.attention,
    q,
    k,
    v,
    window=window,
    block=block,
    scale=scale,
    segment_ids=segment_ids,
    implementation=implementation,
    chunk_size=chunk_size,
  )
  if axis_name is None:
    return run(initial_state=initial_state)
  dispatch.checked(
    ops.attention,
    q,
    k,
    v,
    window=window,
    block=block,
    initial_state=initial_state,
    segment_ids=segment_ids,
  )
  k, v = jnp.asarray(k), jnp.asarray(v)
  rule = Rule(window, block, True)
  initial = initial_state
  if initial is None:
    room = (window or block or 1) - 1
    empty = lambda x: jnp.zeros((x.shape[0], room, *x.shape[2:]), x.dtype)
    initial = AttentionState(empty(k), empty(v), jnp.zeros(k.shape[0], jnp.int32))
  fetch = _from_neighbour if (window or block or k.shape[1] + 2) - 1 <= k.shape[1] else _from_all
  entering, final = fetch(rule, initial, k, v, segment_ids, axis_name)
  out, last = run(initial_state=entering)
  return out, of_last(last, axis_name=axis_name) if final is None else final


def _from_neighbour(rule, initial, k, v, segment_ids, axis_name):
  """The cache of the `reach` steps before this part, which lie in the part before."""
  B, T, G, K = k.shape
  reach = initial.k.shape[1]
  position, _ = step_positions(B, T, segment_ids, initial.position, axis_name=axis_name)
  if reach == 0:
    return initial._replace(position=position[:, 0]), None
  both = jnp.concatenate([k, v], axis=-1).reshape(B, T, -1)
  before = inputs_before(both, reach, None, None, axis_name=axis_name).reshape(B, reach, G, -1)
  # Steps of another segment get positions below 0, which no slot of a cache holds.
  at = position[:, :1] - jnp.arange(reach, 0, -1, dtype=jnp.int32)
  fetched = advance(rule, None, before[..., :K], before[..., K:], Steps(at, jnp.zeros_like(at)))
  first = place(axis_name)[0] == 0
  return jax.tree.map(lambda x, y: jnp.where(first, x.astype(y.dtype), y), initial, fetched), None


def _from_all(rule, initial, k, v, segment_ids, axis_name):
  """(The cache before this part, the cache after the whole sequence), from all keys and values."""
  index, count = place(axis_name)
  B, T, _, K = k.shape
  both = jnp.concatenate([k, v], axis=-1)

  def gathered(to):
    gather = functools.partial(jax.lax.all_gather, axis_name=axis_name, axis=1, tiled=True, to=to)
    ids = None if segment_ids is None else gather(jnp.asarray(segment_ids))
    segments = segment_index("attention", ids, B, count * T)
    return gather(both), steps_of(B, count * T, segments, initial.position)

  kv, steps = gathered("invarying")
  final = advance(rule, initial, kv[..., :K], kv[..., K:], steps)

  # Turned so that the step before this part is the last one; steps from this part on are no one's.
  kv, steps = gathered("varying")
  turn = lambda x: jnp.roll(x, -index * T, axis=1)
  earlier = jnp.arange(count * T) >= (count - index) * T
  segment = jnp.where(earlier, turn(steps.segment), -1)
  kv = turn(kv)
  before = advance(rule, initial, kv[..., :K], kv[..., K:], Steps(turn(steps.position), segment))
  room = before.k.shape[1]
  padded = lambda x: jnp.pad(x, ((0, 0), (0, room - x.shape[1]), (0, 0), (0, 0)))
  initial = AttentionState(padded(initial.k), padded(initial.v), initial.position)
  first = index == 0
  before = jax.tree.map(lambda x, y: jnp.where(first, x, y), initial, before)
  # Of the segment that the first step of this part belongs to.
  start = jax.lax.dynamic_slice_in_dim(steps.position, index * T, 1, axis=1)[:, 0]
  return before._replace(position=start), final
