"""Sums of log decays inside a chunk, and scores of pairs of tokens that are weighted by them.

Only sums over ranges of tokens are exponentiated, each formed by adding terms of one sign. No
difference of two cumulative sums is taken, so a decay of exp(-20), or of 0, costs no accuracy
anywhere.

Inside a chunk, a pair of tokens i > j is weighted by the decays of the tokens between them. Blocks
of 1, 2, 4, ... tokens are merged two by two: every pair meets at exactly one merge, where j is in
the first half and i in the second. There the weight splits at the boundary between the halves into
exp(sum from there to i) * exp(sum from j to there): both sums have terms of one sign, both factors
are at most 1, and the scores of the merge are one matrix product.

`read_first` says that a token reads the state before its own decay. Its `before`, and the weights
between it and earlier tokens, then leave its own log decay out.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.precision import product

# Products of blocks below this size are cheaper as multiply-and-sum than as calls of a
# matrix-product library.
_SMALLEST_MATRIX_PRODUCT = 4


class Sums(NamedTuple):
  """Sums of log decays inside blocks of s tokens, [..., C/s, s, X] (`total`: [..., C/s, 1, X])."""

  before: jax.Array  # from the block's start up to the read of token i
  after: jax.Array  # of the tokens after j to the block's end
  total: jax.Array

  @classmethod
  def of_tokens(cls, log_decay, read_first: bool = False) -> "Sums":
    """Those of blocks of one token, of log decays [..., C, X]."""
    tokens = log_decay[..., :, None, :]
    return cls(jnp.zeros_like(tokens) if read_first else tokens, jnp.zeros_like(tokens), tokens)

  def merged(self) -> "Sums":
    """Those of blocks of twice as many tokens."""
    (before_1, before_2), (after_1, after_2) = halves(self.before), halves(self.after)
    total_1, total_2 = halves(self.total)
    return Sums(
      jnp.concatenate([before_1, total_1 + before_2], axis=-2),
      jnp.concatenate([after_1 + total_2, after_2], axis=-2),
      total_1 + total_2,
    )


def whole_chunk(log_decay: jax.Array, *, read_first: bool = False) -> Sums:
  """The sums over whole chunks, [..., C, X]."""
  sums = Sums.of_tokens(log_decay, read_first)
  while sums.before.shape[-3] > 1:
    sums = sums.merged()
  return Sums(*(x[..., 0, :, :] for x in sums))


def decayed_scores(
  q: jax.Array,  # [..., C, K]
  k: jax.Array,  # [..., C, K]
  log_decay: jax.Array,  # [..., C, K], or [..., C, 1] for one decay of all key channels
  dtype: jax.typing.DTypeLike,
  *,
  read_first: bool = False,
  diagonal: jax.Array | None = None,
  rank: int = 1,
  own_weight: jax.Array | None = None,
) -> jax.Array:
  """[..., C, C]: the sum over K of q_i k_j weighted by the decays between; zero for j > i.

  Args:
    dtype: of the operands of the matrix products; sums are float32 or wider.
    diagonal: [..., C], the scores of a token with itself; None means q_i k_i.
    rank: rows of a token; several only with one decay of all key channels. Then the scores of a
      token's rows with each other, later ones too, are q_i k_j times `own_weight` [..., C], which
      one row per token does not read.
  """
  size, length = 1, q.shape[-2]
  sums = Sums.of_tokens(log_decay, read_first)
  per_channel = log_decay.shape[-1] > 1
  if per_channel:
    own = diagonal_scores(q, k) if diagonal is None else diagonal
    table = own[..., None, None]  # [..., C/s, s, s]: the scores inside each block
  else:
    table = jnp.zeros_like(sums.total)  # the log of the scores' weights, the same for all channels
  while size < length:
    before_2, after_1 = halves(sums.before)[1], halves(sums.after)[0]
    if per_channel:
      cross = cross_scores(blocks(q, size), blocks(k, size), before_2, after_1, dtype)
    else:
      cross = before_2 + jnp.swapaxes(after_1, -1, -2)
    first, second = halves(table)
    above = jnp.full_like(first, 0.0 if per_channel else -jnp.inf)
    table = jnp.concatenate(
      [jnp.concatenate([first, above], -1), jnp.concatenate([cross, second], -1)], -2
    )
    sums, size = sums.merged(), 2 * size
  table = table[..., 0, :, :]
  if per_channel:
    return table
  scores, weights = product("...ik,...jk->...ij", q, k, dtype), jnp.exp(table)
  if rank > 1:
    token = jnp.arange(length) // rank
    weights = jnp.where(token[:, None] == token, own_weight[..., None], weights)
  scores = scores * weights
  if diagonal is None:
    return scores
  return jnp.where(jnp.eye(length, dtype=bool), diagonal[..., None], scores)


def diagonal_scores(q: jax.Array, k: jax.Array, weight: jax.Array | None = None) -> jax.Array:
  """[..., C]: q_i k_i, whose channels may have a weight."""
  weighted = q if weight is None else q * weight
  return jnp.sum(weighted * k, axis=-1, dtype=jnp.result_type(jnp.float32, q.dtype))


def cross_scores(q, k, before_2, after_1, dtype):
  """[..., C/2s, s, s]: the scores of each second half against its first half."""
  queries, keys = halves(q)[1] * jnp.exp(before_2), halves(k)[0] * jnp.exp(after_1)
  if q.shape[-2] < _SMALLEST_MATRIX_PRODUCT:
    return jnp.sum(queries[..., :, None, :] * keys[..., None, :, :], axis=-1)
  return product("...ik,...jk->...ij", queries, keys, dtype)


def blocks(x: jax.Array, size: int) -> jax.Array:
  """[..., C, X] -> [..., C/size, size, X]."""
  return x.reshape(*x.shape[:-2], x.shape[-2] // size, size, x.shape[-1])


def halves(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
  """[..., M, s, X] -> the even and the odd blocks, [..., M/2, s, X] each."""
  return blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
