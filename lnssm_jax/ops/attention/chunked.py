"""Softmax attention in tiles of C x C scores, memory linear in T; README.md has the derivation.

All blocks of queries are multiplied by one block of keys each at once: first their own, then the
one before, and so on, as far back as the mask lets any of them see. The softmax is accumulated with
running maxima and sums (Milakov and Gimelshein 2018); the residuals are the output and the
logarithm of each denominator, the scores are recomputed (Dao et al. 2022).

Layout inside: keys `[B, G, N, C, K]`, N blocks of C tokens; a block of the cache `[B, G, C, K]`;
queries `[B, G, N, Q, K]`, where Q = R C holds a block's tokens for each of the R query heads that
read the same key head.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.ops.attention.cache import EMPTY, cached_tokens, tokens_of
from lnssm_jax.ops.attention.types import Inputs, Options, Tokens
from lnssm_jax.ops.core.dropout import multipliers
from lnssm_jax.ops.core.precision import accumulation_dtype, product
from lnssm_jax.ops.core.segments import no_gradient
from lnssm_jax.ops.core.spmd import vary_alike
from pallas_kernels.core.gradients import custom_vjp

DEFAULT_CHUNK_SIZE = 128
_PADDING = -2  # the document of padding: these tokens see each other, so no softmax is empty


class _Tile(NamedTuple):
  """One block of keys for each block of queries, or one for all (of a cache)."""

  k: jax.Array  # [B, G, N, C, K] or, of a cache, [B, G, C, K]
  v: jax.Array
  tokens: Tokens  # [B, N, C] or [B, C]


class _Queries(NamedTuple):
  q: jax.Array  # [B, G, N, Q, K]
  tokens: Tokens  # [B, N, Q]
  dropout_keys: jax.Array | None  # [B, G, N, Q, 2] uint32


class _Integers(NamedTuple):
  """The arguments without a gradient."""

  tokens: Tokens
  cache_tokens: Tokens | None
  dropout_keys: jax.Array | None  # [B, T, H, 2] uint32


class _Softmax(NamedTuple):
  """Running softmax of each query, [B, G, N, Q] and for `value` another V."""

  maximum: jax.Array
  total: jax.Array
  value: jax.Array


def chunked(inputs: Inputs, options: Options) -> jax.Array:
  """out [B, T, H, V]. Reverse mode only."""
  q, k, v, state, _, dropout_keys, sinks = inputs
  size = min(options.chunk_size or DEFAULT_CHUNK_SIZE, q.shape[1])
  static = options._replace(chunk_size=size)
  cache, cache_tokens = None, None
  if state is not None and state.k.shape[1] > 0:
    cache, cache_tokens = (state.k, state.v), cached_tokens(state)
  integers = _Integers(tokens_of(inputs), cache_tokens, dropout_keys)
  return _attend(static, (q, k, v, cache, sinks), integers)


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def _attend(static, arrays, integers):
  return _forward(static, arrays, integers)[0]


def _forward(static, arrays, integers):
  """(output, residuals)."""
  queries, tile, cached = _split(static, arrays, integers)
  q, v, dtype = queries.q, tile.v, arrays[2].dtype
  acc = accumulation_dtype(*arrays[:3])
  maximum, total = jnp.full(q.shape[:-1], -jnp.inf, acc), jnp.zeros(q.shape[:-1], acc)
  if (sinks := arrays[4]) is not None:
    maximum = jnp.broadcast_to(_sinks_layout(sinks.astype(acc), q, static), maximum.shape)
    total = jnp.ones_like(total)
  start = _Softmax(maximum, total, jnp.zeros((*q.shape[:-1], v.shape[-1]), acc))
  start, queries, tile, cached = vary_alike((start, queries, tile, cached))

  def attend(softmax, tile):
    scores = _scores(static, queries, tile, dtype)
    maximum = jnp.maximum(softmax.maximum, scores.max(-1))
    weights = jnp.exp(scores - maximum[..., None])
    fade = jnp.exp(softmax.maximum - maximum)
    total = fade * softmax.total + weights.sum(-1)
    if queries.dropout_keys is not None:
      weights = weights * _dropped(static, queries, tile, acc)
    value = product(_equation("{q}j,{k}v->{q}v", tile), weights, tile.v, dtype)
    return _Softmax(maximum, total, fade[..., None] * softmax.value + value)

  softmax, _ = _for_each(
    lambda softmax, shift: (attend(softmax, _shift_tile(tile, shift)), None),
    start,
    _shifts(static, q.shape[2]),
  )
  if cached is not None:
    softmax, _ = _for_each(lambda softmax, tile: (attend(softmax, tile), None), softmax, cached)
  out = _join(softmax.value / softmax.total[..., None], static, arrays[0].shape)
  out = out.astype(dtype)
  log_total = softmax.maximum + jnp.log(softmax.total)
  return out, (arrays, integers, out, log_total)


@jax.named_scope("attention")
def _backward(static, residuals, d_out):
  arrays, integers, out, log_total = residuals
  dtype, acc = arrays[2].dtype, accumulation_dtype(*arrays[:3])
  (queries, tile, cached), split_vjp = jax.vjp(
    lambda arrays: _split(static, arrays, integers), arrays
  )
  # y = sum_j m_j p_j v_j, p = softmax(s), m of dropout: ds_j = p_j (m_j dy . v_j - dy . y).
  groups = tile.k.shape[1]
  d_out = d_out.astype(acc)
  along = _queries_layout((d_out * out.astype(acc)).sum(-1, keepdims=True), groups, static)
  d_out = _queries_layout(d_out, groups, static)
  zeros = lambda x: jnp.zeros(x.shape, acc)
  d_q, d_k, d_v = zeros(queries.q), zeros(tile.k), zeros(tile.v)
  (d_q, d_k, d_v), queries, tile, cached, log_total, d_out, along = vary_alike(
    ((d_q, d_k, d_v), queries, tile, cached, log_total, d_out, along)
  )

  def gradients(tile):
    """The contribution of one tile to dq, and its dk and dv."""
    scores = _scores(static, queries, tile, dtype)
    weights = jnp.exp(scores - log_total[..., None])
    d_weights = product(_equation("{q}v,{k}v->{q}j", tile), d_out, tile.v, dtype)
    kept = weights
    if queries.dropout_keys is not None:
      factors = _dropped(static, queries, tile, acc)
      kept, d_weights = weights * factors, d_weights * factors
    d_v = product(_equation("{q}j,{q}v->{k}v", tile), kept, d_out, dtype)
    d_scores = static.scale * weights * (d_weights - along)
    if static.soft_cap is not None:  # the derivative of the cap; hidden scores are -inf
      d_scores *= 1 - jnp.square(jnp.where(weights > 0, scores, 0.0) / static.soft_cap)
    d_q = product(_equation("{q}j,{k}x->{q}x", tile), d_scores, tile.k, dtype)
    return d_q, product(_equation("{q}j,{q}x->{k}x", tile), d_scores, queries.q, dtype), d_v

  def step(carry, shift):
    d_q, d_k, d_v = gradients(_shift_tile(tile, shift))
    back = lambda x: _roll(x, -shift, 2)
    return jax.tree.map(jnp.add, carry, (d_q, back(d_k), back(d_v))), None

  (d_q, d_k, d_v), _ = _for_each(step, (d_q, d_k, d_v), _shifts(static, d_q.shape[2]))
  d_cached = None
  if cached is not None:

    def cache_step(d_q, tile):
      more, d_k, d_v = gradients(tile)
      return d_q + more, (d_k, d_v)

    d_q, d_cached = _for_each(cache_step, d_q, cached)

  d_split = (
    _Queries(d_q.astype(queries.q.dtype), *no_gradient(queries[1:])),
    _Tile(d_k.astype(tile.k.dtype), d_v.astype(tile.v.dtype), no_gradient(tile.tokens)),
    None
    if cached is None
    else _Tile(
      d_cached[0].astype(cached.k.dtype),
      d_cached[1].astype(cached.v.dtype),
      no_gradient(cached.tokens),
    ),
  )
  (d_arrays,) = split_vjp(d_split)
  if (sinks := arrays[4]) is not None:
    # A sink is a key with the value 0: ds = p (0 - dy . y); padding has no cotangent.
    share = jnp.exp(_sinks_layout(sinks.astype(acc), queries.q, static) - log_total)
    of_query = _join((-share * along[..., 0])[..., None], static, arrays[0].shape)
    d_arrays = (*d_arrays[:4], of_query.sum((0, 1, 3)).astype(sinks.dtype))
  return d_arrays, no_gradient(integers)


_attend.defvjp(_forward, _backward)


def _scores(static, queries: _Queries, tile: _Tile, dtype):
  """[B, G, N, Q, C], -inf where a query does not see a key."""
  scores = product(_equation("{q}x,{k}x->{q}j", tile), queries.q, tile.k, dtype)
  keys = tile.tokens
  if tile.k.ndim == 4:
    keys = Tokens(*(x[:, None] for x in keys))
  visible = static.mask.visible(queries.tokens, keys)[:, None]
  return jnp.where(visible, static.capped(scores), -jnp.inf)


def _dropped(static, queries: _Queries, tile: _Tile, dtype):
  """The factors of dropout, [B, G, N, Q, C]: functions of query, head and the key's position."""
  position = tile.tokens.position
  position = position[:, None, None, None] if tile.k.ndim == 4 else position[:, None, :, None]
  keys: Any = queries.dropout_keys
  return multipliers(keys[..., None, :], position, static.dropout, dtype)


def _equation(pattern, tile):
  return pattern.format(q="bgnq", k="bgnj" if tile.k.ndim == 5 else "bgj")


def _shifts(static, blocks):
  """How many blocks back the keys of each iteration are; all blocks of queries take part in each.

  A block starts with its own keys: from then on every running maximum is finite.
  """
  length = blocks * static.chunk_size
  reach = static.mask.reach(length)
  furthest = blocks - 1
  if reach is not length:
    furthest = min(-(-(reach - 1) // static.chunk_size), furthest)
  if static.mask.causal:
    return jnp.arange(furthest + 1)
  # Blocks are visited in a circle, each once.
  if 2 * furthest + 1 < blocks:
    return jnp.concatenate([jnp.arange(furthest + 1), -jnp.arange(1, furthest + 1)])
  return jnp.arange(blocks)


def _shift_tile(tile: _Tile, shift) -> _Tile:
  """The tile of the queries `shift` blocks later."""
  tokens = Tokens(*(_roll(x, shift, 1) for x in tile.tokens))
  return _Tile(_roll(tile.k, shift, 2), _roll(tile.v, shift, 2), tokens)


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


def _split(static, arrays, integers: _Integers):
  """The queries, the keys in blocks, and the blocks of the cache on a leading axis, or None."""
  (q, k, v, cache, _), (tokens, cache_tokens, dropout_keys) = arrays, integers
  size, groups = static.chunk_size, k.shape[2]
  key_tokens = _blocks_of_tokens(tokens, size, _PADDING)
  heads = q.shape[2] // groups
  if dropout_keys is not None:
    dropout_keys = _queries_layout(dropout_keys, groups, static)
  queries = _Queries(
    _queries_layout(q, groups, static),
    Tokens(*(jnp.tile(x, (1, 1, heads)) for x in key_tokens)),
    dropout_keys,
  )
  tile = _Tile(_keys_layout(k, size), _keys_layout(v, size), key_tokens)
  if cache is None or cache_tokens is None:
    return queries, tile, None
  # A few queries attend to the whole cache at once: no more scores than tiles have.
  room = cache[0].shape[1]
  size = room if q.shape[1] <= size else min(size, room)
  first = lambda x, axis: jnp.moveaxis(x, axis, 0)
  cache_tokens = Tokens(*(first(x, 1) for x in _blocks_of_tokens(cache_tokens, size, EMPTY)))
  cached_k, cached_v = (first(_keys_layout(x, size), 2) for x in cache)
  cached = _Tile(cached_k, cached_v, cache_tokens)
  return queries, tile, cached


def _queries_layout(x, groups, static):
  """[B, T, H, X] -> [B, G, N, Q, X], zeros after the last token."""
  B, T, H, X = x.shape
  size, heads = static.chunk_size, H // groups
  x = jnp.pad(x, ((0, 0), (0, -T % size), (0, 0), (0, 0)))
  x = x.reshape(B, -1, size, groups, heads, X).transpose(0, 3, 1, 4, 2, 5)
  return x.reshape(B, groups, -1, heads * size, X)


def _sinks_layout(sinks, q, static):
  """[H] -> [G, 1, Q], for queries [B, G, N, Q, K]."""
  return jnp.repeat(sinks.reshape(q.shape[1], -1), static.chunk_size, axis=1)[:, None]


def _keys_layout(x, size):
  """[B, T, G, X] -> [B, G, N, C, X], zeros after the last token."""
  B, T, G, X = x.shape
  x = jnp.pad(x, ((0, 0), (0, -T % size), (0, 0), (0, 0)))
  return x.reshape(B, -1, size, G, X).transpose(0, 3, 1, 2, 4)


def _blocks_of_tokens(tokens: Tokens, size, document_of_padding):
  """[B, T] -> [B, N, C]."""
  missing = ((0, 0), (0, -tokens.position.shape[1] % size))
  document = jnp.pad(tokens.document, missing, constant_values=document_of_padding)
  return Tokens(
    *(x.reshape(x.shape[0], -1, size) for x in (jnp.pad(tokens.position, missing), document))
  )


def _join(x, static, shape):
  """[B, G, N, Q, X] -> [B, T, H, X], for `shape` [B, T, H, any]."""
  B, T, H, _ = shape
  G, N, X = x.shape[1], x.shape[2], x.shape[-1]
  x = x.reshape(B, G, N, H // G, static.chunk_size, X).transpose(0, 2, 4, 1, 3, 5)
  return x.reshape(B, N * static.chunk_size, H, X)[:, :T]
