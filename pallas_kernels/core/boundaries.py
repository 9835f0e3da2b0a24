"""Document boundaries in the kernels that keep one state per channel.

All of them get `first` [B, T], set at the first token of each document, and reset the recurrent
state there. Three places need it, and each has one function here:

* inside a kernel, per token: `reset`, for the state and, in a backward pass, for its cotangent;
* between the splits of a sequence, in XLA: `in_splits`, where nothing passes a split with a first
  token in it;
* on the way into a kernel: `as_flags` for kernels that load tokens through SMEM, one int32 per
  token; `pack_bits` and `bit` for kernels that load them from GMEM, one word per few tokens.
"""

import jax
import jax.numpy as jnp


def select(flag, tree, otherwise):
  """`tree` where `flag`, else `otherwise`; `flag` None means False.

  A selection, not a product: NaN and infinity do not pass.
  """
  if flag is None:
    return otherwise
  return jax.tree.map(lambda x, y: jnp.where(flag, x, y), tree, otherwise)


def reset(is_first, state, empty):
  """The state that a token reads: `empty` at the first token of a document.

  Args:
    is_first: a boolean scalar, or None where there are no boundaries.
    state: an array or a tree of arrays; `empty` likewise.
  """
  return select(is_first, empty, state)


def in_splits(first: jax.Array | None, num_splits: int) -> jax.Array | None:
  """[B, num_splits, 1]: whether a document begins in a split, so that no state passes it."""
  if first is None:
    return None
  return jnp.any(first.reshape(first.shape[0], num_splits, -1), axis=2)[..., None]


def as_flags(first: jax.Array | None) -> jax.Array | None:
  """`first` as int32, which copies to SMEM take."""
  return None if first is None else first.astype(jnp.int32)


def pack_bits(first: jax.Array | None, tokens: int) -> jax.Array | None:
  """[B, T / tokens, rounded up] int32: one bit per token, `tokens` of them in a word."""
  if first is None:
    return None
  B, T = first.shape
  first = jnp.pad(first, ((0, 0), (0, -T % tokens))).reshape(B, -1, tokens)
  bits = first.astype(jnp.int32) << jnp.arange(tokens, dtype=jnp.int32)
  return jnp.sum(bits, axis=2, dtype=jnp.int32)


def bit(word, n):
  """Token n's flag in a word of `pack_bits`; None without boundaries."""
  return None if word is None else (word >> n) & 1 != 0
