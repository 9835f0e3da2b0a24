"""Softmax attention in tiles of C x C scores, memory linear in T.

README.md beside this file has the derivation. All blocks of queries meet one block of keys each at
once: first their own, then the one before, and so on, as far as the window or the causal order lets
any of them see. Running maxima and sums make the softmax (Milakov and Gimelshein 2018); the
backward pass keeps the output and the logarithm of each denominator and recomputes the scores (Dao
et al. 2022).

Layout inside: keys `[B, G, N, C, K]`, N blocks of C steps; a block of the cache `[B, G, C, K]`;
queries `[B, G, N, Q, K]`, where Q = R C holds a block's steps for each of the R query heads that
read the same key head.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax.ops.attention.state import Rule, Steps, cached_steps
from lnssm_jax.ops.checks import accumulation_dtype, vary_alike
from lnssm_jax.ops.products import product

DEFAULT_CHUNK_SIZE = 128
_PADDING = -2  # the segment of steps after the last; they see each other, so no softmax is empty
_EMPTY = -1  # the segment of empty slots of a cache; nothing sees them


class _Static(NamedTuple):
  """What the compiled program is specialised to."""

  rule: Rule
  scale: float
  chunk_size: int


class _Tile(NamedTuple):
  """Keys that the queries meet together."""

  k: jax.Array  # [B, G, N, C, K] or, of a cache, [B, G, C, K]
  v: jax.Array
  steps: Steps  # [B, N, C] or [B, C]


class _Queries(NamedTuple):
  q: jax.Array  # [B, G, N, Q, K]
  steps: Steps  # [B, N, Q]


class _Softmax(NamedTuple):
  """Running softmax of each query, [B, G, N, Q] and for `value` another V."""

  maximum: jax.Array
  total: jax.Array
  value: jax.Array


def chunked(q, k, v, state, steps, *, rule, scale, segmented, chunk_size=None):
  """The chunked form; arguments as in `reference.py`."""
  del segmented
  static = _Static(rule, scale, min(chunk_size or DEFAULT_CHUNK_SIZE, q.shape[1]))
  cache = None if state is None or state.k.shape[1] == 0 else (state.k, state.v)
  cache_steps = None if cache is None else cached_steps(state)
  return _attend(static, (q, k, v, cache), steps, cache_steps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, arrays, steps, cache_steps):
  return _forward(static, arrays, steps, cache_steps)[0]


def _forward(static, arrays, steps, cache_steps):
  """Returns the output and what the backward pass keeps."""
  queries, tile, cached = _split(static, arrays, steps, cache_steps)
  q, v, dtype = queries.q, tile.v, arrays[2].dtype
  acc = accumulation_dtype(*arrays[:3])
  start = _Softmax(
    jnp.full(q.shape[:-1], -jnp.inf, acc),
    jnp.zeros(q.shape[:-1], acc),
    jnp.zeros((*q.shape[:-1], v.shape[-1]), acc),
  )
  start, queries, tile, cached = vary_alike((start, queries, tile, cached))

  def meet(softmax, tile):
    scores = _scores(static, queries, tile, dtype)
    maximum = jnp.maximum(softmax.maximum, scores.max(-1))
    weights = jnp.exp(scores - maximum[..., None])
    fade = jnp.exp(softmax.maximum - maximum)
    value = product(_equation("{q}j,{k}v->{q}v", tile), weights, tile.v, dtype)
    return _Softmax(
      maximum, fade * softmax.total + weights.sum(-1), fade[..., None] * softmax.value + value
    )

  softmax, _ = _for_each(
    lambda softmax, shift: (meet(softmax, _shift_tile(tile, shift)), None),
    start,
    _shifts(static, q.shape[2]),
  )
  if cached is not None:
    softmax, _ = _for_each(lambda softmax, tile: (meet(softmax, tile), None), softmax, cached)
  out = _join(softmax.value / softmax.total[..., None], static, arrays[0].shape)
  out = out.astype(dtype)
  log_total = softmax.maximum + jnp.log(softmax.total)
  return out, (arrays, steps, cache_steps, out, log_total)


@jax.named_scope("attention")
def _backward(static, kept, d_out):
  arrays, steps, cache_steps, out, log_total = kept
  dtype, acc = arrays[2].dtype, accumulation_dtype(*arrays[:3])
  (queries, tile, cached), split_vjp = jax.vjp(
    lambda arrays: _split(static, arrays, steps, cache_steps), arrays
  )
  # y = sum_j p_j v_j and p = softmax(s): ds_j = p_j (dy . v_j - dy . y).
  groups = tile.k.shape[1]
  d_out = d_out.astype(acc)
  along = _queries_layout((d_out * out.astype(acc)).sum(-1, keepdims=True), groups, static)
  d_out = _queries_layout(d_out, groups, static)
  zeros = lambda x: jnp.zeros(x.shape, acc)
  d_q, d_k, d_v = zeros(queries.q), zeros(tile.k), zeros(tile.v)
  (d_q, d_k, d_v), queries, tile, cached, log_total, d_out, along = vary_alike(
    ((d_q, d_k, d_v), queries, tile, cached, log_total, d_out, along)
  )

  def meet(tile):
    """What one tile adds to dq, and its dk and dv."""
    weights = jnp.exp(_scores(static, queries, tile, dtype) - log_total[..., None])
    d_v = product(_equation("{q}j,{q}v->{k}v", tile), weights, d_out, dtype)
    d_weights = product(_equation("{q}v,{k}v->{q}j", tile), d_out, tile.v, dtype)
    d_scores = static.scale * weights * (d_weights - along)
    d_q = product(_equation("{q}j,{k}x->{q}x", tile), d_scores, tile.k, dtype)
    return d_q, product(_equation("{q}j,{q}x->{k}x", tile), d_scores, queries.q, dtype), d_v

  def step(carry, shift):
    d_q, d_k, d_v = meet(_shift_tile(tile, shift))
    back = lambda x: _roll(x, -shift, 2)
    return jax.tree.map(jnp.add, carry, (d_q, back(d_k), back(d_v))), None

  (d_q, d_k, d_v), _ = _for_each(step, (d_q, d_k, d_v), _shifts(static, d_q.shape[2]))
  d_cached = None
  if cached is not None:

    def cache_step(d_q, tile):
      more, d_k, d_v = meet(tile)
      return d_q + more, (d_k, d_v)

    d_q, d_cached = _for_each(cache_step, d_q, cached)

  no_gradient = lambda tree: jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), tree)
  d_split = (
    _Queries(d_q.astype(queries.q.dtype), no_gradient(queries.steps)),
    _Tile(d_k.astype(tile.k.dtype), d_v.astype(tile.v.dtype), no_gradient(tile.steps)),
    None
    if cached is None
    else _Tile(
      d_cached[0].astype(cached.k.dtype),
      d_cached[1].astype(cached.v.dtype),
      no_gradient(cached.steps),
    ),
  )
  (d_arrays,) = split_vjp(d_split)
  return d_arrays, no_gradient(steps), no_gradient(cache_steps)


_attend.defvjp(_forward, _backward)


def _scores(static, queries: _Queries, tile: _Tile, dtype):
  """[B, G, N, Q, C], -inf where a query does not see a key."""
  scores = product(_equation("{q}x,{k}x->{q}j", tile), queries.q, tile.k, dtype)
  keys = tile.steps
  if tile.k.ndim == 4:
    keys = Steps(*(x[:, None] for x in keys))
  visible = static.rule.visible(queries.steps, keys)[:, None]
  return jnp.where(visible, static.scale * scores, -jnp.inf)


def _equation(pattern, tile):
  return pattern.format(q="bgnq", k="bgnj" if tile.k.ndim == 5 else "bgj")


def _shifts(static, blocks):
  """How many blocks back each meeting is; all blocks of queries take part in each.

  A block meets itself first: from then on every running maximum is finite.
  """
  reach = static.rule.reach(blocks * static.chunk_size)
  furthest = min(-(-(reach - 1) // static.chunk_size), blocks - 1)
  if static.rule.causal:
    return jnp.arange(furthest + 1)
  # Blocks are met in a circle, each once.
  if 2 * furthest + 1 < blocks:
    return jnp.concatenate([jnp.arange(furthest + 1), -jnp.arange(1, furthest + 1)])
  return jnp.arange(blocks)


def _shift_tile(tile: _Tile, shift) -> _Tile:
  """The tile as queries `shift` blocks later meet it."""
  steps = Steps(*(_roll(x, shift, 1) for x in tile.steps))
  return _Tile(_roll(tile.k, shift, 2), _roll(tile.v, shift, 2), steps)


def _roll(x, shift, axis):
  size = x.shape[axis]
  if size == 1:
    return x
  twice = jnp.concatenate([x, x], axis)
  return jax.lax.dynamic_slice_in_dim(twice, -shift % size, size, axis)


def _for_each(step, carry, xs):
  """`lax.scan`, without the loop if there is one element."""
  if jax.tree.leaves(xs)[0].shape[0] > 1:
    return jax.lax.scan(step, carry, xs)
  carry, y = step(carry, jax.tree.map(lambda x: x[0], xs))
  return carry, jax.tree.map(lambda x: x[None], y)


def _split(static, arrays, steps, cache_steps):
  """The queries, the keys in blocks, and the blocks of the cache on a leading axis, or None."""
  q, k, v, cache = arrays
  size, groups = static.chunk_size, k.shape[2]
  key_steps = _blocks_of_steps(steps, size, _PADDING)
  heads = q.shape[2] // groups
  queries = _Queries(
    _queries_layout(q, groups, static), Steps(*(jnp.tile(x, (1, 1, heads)) for x in key_steps))
  )
  tile = _Tile(_keys_layout(k, size), _keys_layout(v, size), key_steps)
  if cache is None:
    return queries, tile, None
  # A few queries meet the whole cache at once: no more scores than tiles have.
  room = cache[0].shape[1]
  size = room if q.shape[1] <= size else min(size, room)
  first = lambda x, axis: jnp.moveaxis(x, axis, 0)
  cache_steps = Steps(*(first(x, 1) for x in _blocks_of_steps(cache_steps, size, _EMPTY)))
  cached = _Tile(*(first(_keys_layout(x, size), 2) for x in cache), cache_steps)
  return queries, tile, cached


def _queries_layout(x, groups, static):
  """[B, T, H, X] -> [B, G, N, Q, X], zeros after the last step."""
  B, T, H, X = x.shape
  size, heads = static.chunk_size, H // groups
  x = jnp.pad(x, ((0, 0), (0, -T % size), (0, 0), (0, 0)))
  x = x.reshape(B, -1, size, groups, heads, X).transpose(0, 3, 1, 4, 2, 5)
  return x.reshape(B, groups, -1, heads * size, X)


def _keys_layout(x, size):
  """[B, T, G, X] -> [B, G, N, C, X], zeros after the last step."""
  B, T, G, X = x.shape
  x = jnp.pad(x, ((0, 0), (0, -T % size), (0, 0), (0, 0)))
  return x.reshape(B, -1, size, G, X).transpose(0, 3, 1, 2, 4)


def _blocks_of_steps(steps: Steps, size, segment_of_padding):
  """[B, T] -> [B, N, C]."""
  missing = ((0, 0), (0, -steps.position.shape[1] % size))
  segment = jnp.pad(steps.segment, missing, constant_values=segment_of_padding)
  return Steps(
    *(x.reshape(x.shape[0], -1, size) for x in (jnp.pad(steps.position, missing), segment))
  )


def _join(x, static, shape):
  """[B, G, N, Q, X] -> [B, T, H, X], for `shape` [B, T, H, any]."""
  B, T, H, _ = shape
  G, N, X = x.shape[1], x.shape[2], x.shape[-1]
  x = x.reshape(B, G, N, H // G, static.chunk_size, X).transpose(0, 2, 4, 1, 3, 5)
  return x.reshape(B, N * static.chunk_size, H, X)[:, :T]
