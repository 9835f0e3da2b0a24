"""Softmax attention on one shard of a sequence: it fetches the keys and values before the shard.

They become the key-value cache with which attention then runs on the shard alone. With a window or
blocks that reach no further back than one shard, the last keys and values of the shard before are
fetched from one neighbor. Otherwise all keys and values are gathered: this exchange grows with T,
as the work does.
"""

import functools

import jax
import jax.numpy as jnp

from lnssm_jax.ops.attention.cache import advance
from lnssm_jax.ops.attention.types import AttentionState, Inputs, Mask, Options, Tokens, init_state
from lnssm_jax.ops.core.halo import inputs_before, of_last, step_positions
from lnssm_jax.ops.core.segments import positions, segments_of
from lnssm_jax.ops.core.sequence_parallel import place


def sharded(run, inputs: Inputs, options: Options, axis_name: str):
  """(out of this shard, state after the whole sequence)."""
  _, k, v, initial, segments, *_ = inputs
  mask, ids = options.mask, None if segments is None else segments.ids
  if not mask.causal:
    raise NotImplementedError(
      f"attention: axis_name={axis_name!r} with causal=False; every shard would need all later "
      "ones. Leave the time axis whole."
    )
  if initial is None:
    initial = _empty(mask, k, v)
  near = mask.room is not None and mask.room <= k.shape[1]
  fetch = _from_neighbor if near else _from_all
  entering, final = fetch(mask, initial, k, v, ids, axis_name)
  out, last = run(inputs._replace(state=entering))
  return out, of_last(last, axis_name=axis_name) if final is None else final


def _empty(mask: Mask, k, v) -> AttentionState:
  state = init_state(
    batch=k.shape[0],
    kv_heads=k.shape[2],
    key_dim=k.shape[3],
    value_dim=v.shape[3],
    window=mask.window,
    block=mask.block,
  )
  return state._replace(k=state.k.astype(k.dtype), v=state.v.astype(v.dtype))


def _from_neighbor(mask: Mask, initial, k, v, segment_ids, axis_name):
  """The cache of the tokens before this shard, which are in the shard before."""
  B, T, G, K = k.shape
  room = initial.k.shape[1]
  position, _ = step_positions(B, T, segment_ids, initial.position, axis_name=axis_name)
  if room == 0:
    return initial._replace(position=position[:, 0]), None
  both = jnp.concatenate([k, v], axis=-1).reshape(B, T, -1)
  before = inputs_before(both, room, None, None, axis_name=axis_name).reshape(B, room, G, -1)
  # Tokens of another document get positions below 0, which no slot of a cache holds.
  at = position[:, :1] - jnp.arange(room, 0, -1, dtype=jnp.int32)
  fetched = advance(mask, None, before[..., :K], before[..., K:], Tokens(at, jnp.zeros_like(at)))
  first = place(axis_name)[0] == 0
  return jax.tree.map(lambda x, y: jnp.where(first, x.astype(y.dtype), y), initial, fetched), None


def _from_all(mask: Mask, initial, k, v, segment_ids, axis_name):
  """(The cache before this shard, the cache after the whole sequence), from all keys and values."""
  index, count = place(axis_name)
  B, T, _, K = k.shape
  both = jnp.concatenate([k, v], axis=-1)

  def gathered(to):
    gather = functools.partial(jax.lax.all_gather, axis_name=axis_name, axis=1, tiled=True, to=to)
    ids = None if segment_ids is None else gather(segment_ids)
    segments = segments_of("attention", ids, B, count * T)
    position = positions(segments, B, count * T, initial.position)
    document = jnp.zeros_like(position) if segments is None else segments.index
    return gather(both), Tokens(position, document)

  kv, tokens = gathered("invarying")
  final = advance(mask, initial, kv[..., :K], kv[..., K:], tokens)

  # Rotated so that the token before this shard is the last one; later tokens are in no document.
  kv, tokens = gathered("varying")
  rotate = lambda x: jnp.roll(x, -index * T, axis=1)
  earlier = jnp.arange(count * T) >= (count - index) * T
  document = jnp.where(earlier, rotate(tokens.document), -1)
  kv = rotate(kv)
  before = Tokens(rotate(tokens.position), document)
  entering = advance(mask, initial, kv[..., :K], kv[..., K:], before)
  room = entering.k.shape[1]
  padded = lambda x: jnp.pad(x, ((0, 0), (0, room - x.shape[1]), (0, 0), (0, 0)))
  initial = AttentionState(padded(initial.k), padded(initial.v), initial.position)
  first = index == 0
  entering = jax.tree.map(lambda x, y: jnp.where(first, x, y), initial, entering)
  # Of the document that the first token of this shard belongs to.
  start = jax.lax.dynamic_slice_in_dim(tokens.position, index * T, 1, axis=1)[:, 0]
  return entering._replace(position=start), final
