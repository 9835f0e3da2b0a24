"""Splitting a sequence into chunks, `[N, B, H, C, X]`: N chunks of C tokens; and back."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.export import is_symbolic_dim

from lnssm_jax.ops.core.spmd import vary_alike


def chunk_of(size: int, length: Any) -> int:
  """`size`, or for fewer tokens the power of two that holds them.

  A length that is a symbol of `jax.export` has no least power; then it is `size`.
  """
  return size if is_symbolic_dim(length) else min(size, 1 << (length - 1).bit_length())


def chunk(x: jax.Array, size: int) -> jax.Array:
  """[B, T, H, X] -> [N, B, H, C, X], zeros after the last token."""
  B, T, H, X = x.shape
  x = jnp.pad(x, ((0, 0), (0, -T % size), (0, 0), (0, 0)))
  return x.reshape(B, -1, size, H, X).transpose(1, 0, 3, 2, 4)


def join(x: jax.Array, length: int) -> jax.Array:
  """[N, B, H, C, X] -> [B, T, H, X]."""
  N, B, H, C, X = x.shape
  return x.transpose(1, 0, 3, 2, 4).reshape(B, N * C, H, X)[:, :length]


def over_chunks(chunk, carry, by_token, by_chunk=(), *, size, reverse):
  """Runs `chunk(carry, by_token, by_chunk) -> carry, (results_by_token, results_by_chunk)`.

  No array is copied into another layout. `by_token` is split along axis 1; an array of length 1
  there is the same for all tokens. `by_chunk` has one row per chunk. The last tokens that fill no
  chunk are a shorter chunk of their own. Returns the carry, the results by token joined and the
  results by chunk stacked.
  """
  length = max(x.shape[1] for x in jax.tree.leaves(by_token))
  size = min(size, length)
  count, rest = divmod(length, size)
  if count == 1 and not rest:
    carry, (by_token, by_chunk) = chunk(carry, by_token, jax.tree.map(lambda x: x[0], by_chunk))
    return carry, by_token, jax.tree.map(lambda x: x[None], by_chunk)

  def cut(start, size):
    some = lambda x: _row_major(jax.lax.dynamic_slice_in_dim(x, start, size, 1))
    return jax.tree.map(lambda x: x if x.shape[1] == 1 else some(x), by_token)

  def place(carry_and_results, start, size, by_chunk):
    carry, results = carry_and_results
    carry, (pieces, summary) = chunk(carry, cut(start, size), by_chunk)
    put = lambda x, piece: jax.lax.dynamic_update_slice_in_dim(x, _row_major(piece), start, 1)
    return (carry, jax.tree.map(put, results, pieces)), summary

  row = lambda n: jax.tree.map(lambda x: x[n], by_chunk)
  _, (pieces, _) = jax.eval_shape(chunk, carry, cut(0, size), row(0))
  results = jax.tree.map(lambda x: jnp.zeros((x.shape[0], length, *x.shape[2:]), x.dtype), pieces)
  done, last = (carry, vary_alike((results, carry, by_token, by_chunk))[0]), None
  if rest and reverse:
    done, last = place(done, count * size, rest, row(-1))
  done, summaries = jax.lax.scan(
    lambda done, n_and_row: place(done, n_and_row[0] * size, size, n_and_row[1]),
    done,
    (jnp.arange(count), jax.tree.map(lambda x: x[:count], by_chunk)),
    reverse=reverse,
  )
  if rest and not reverse:
    done, last = place(done, count * size, rest, row(-1))
  if rest:
    summaries = jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), summaries, last)
  return *done, summaries


def _row_major(x):
  """x in the layout that arrays have: else XLA copies whole arrays into that of a chunk.

  On GPUs, where memory is short; a program with the constraint cannot be exported.
  """
  constrained = lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim))))
  return jax.lax.platform_dependent(x, cuda=constrained, default=lambda x: x)


def shift(x: Any, later: bool, boundary: jax.Array | None = None) -> Any:
  """Moves x [B, T, ...] one token later (or earlier); `boundary` [B, ...] fills the gap.

  Without `boundary` the gap keeps its value, and an array that is the same for all tokens stays as
  it is.
  """
  if boundary is None and (x is None or x.shape[1] == 1):
    return x
  if later:
    return jnp.concatenate([x[:, :1] if boundary is None else boundary[:, None], x[:, :-1]], axis=1)
  return jnp.concatenate([x[:, 1:], x[:, -1:] if boundary is None else boundary[:, None]], axis=1)


def scan_constant_decay(decays: Sequence[jax.Array], keep, x):
  """h_n = decays[0] h_{n-1} + x_n along axis 1; `decays[i]` is the decay of 2^i steps.

  Where `keep` [B, T, ...] is false, the state before does not count. An associative scan that needs
  no products of decays: pairs of steps are scanned with the next decay, which gives every other h;
  the others follow from those.
  """
  length = x.shape[1]
  if length == 1:
    return x

  def decayed(h, keep):
    h = decays[0] * h
    return h if keep is None else jnp.where(keep, h, 0)

  pick = lambda steps: None if keep is None else keep[:, steps]
  odd, even, even_again = slice(1, None, 2), slice(0, length - length % 2, 2), slice(2, None, 2)
  pairs = decayed(x[:, even], pick(odd)) + x[:, odd]
  keep_pairs = None if keep is None else keep[:, even] & keep[:, odd]
  h_odd = scan_constant_decay(decays[1:], keep_pairs, pairs)
  between = decayed(h_odd[:, : (length - 1) // 2], pick(even_again)) + x[:, even_again]
  h_even = jnp.concatenate([x[:, :1], between], axis=1)
  both = jnp.stack([h_even[:, : length // 2], h_odd], axis=2).reshape(x.shape[0], -1, *x.shape[2:])
  return both if length % 2 == 0 else jnp.concatenate([both, h_even[:, -1:]], axis=1)
