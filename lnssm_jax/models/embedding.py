"""The two ends of a language model: embedding lookup, and the head.

The lookup has a bitwise reproducible gradient.

The gradient of a row is a sum over all occurrences of its token. A scatter-add on a GPU adds
them in the order in which its threads arrive. Here they are sorted by token, stably, and summed by
a segmented scan, so the order is that of the batch.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lnssm_jax.ops.core.checks import (
  check_floating,
  check_shape,
  checked_integers,
  has_known_values,
)
from lnssm_jax.ops.core.spmd import vary_alike
from pallas_kernels.core.gradients import custom_vjp


def check_tokens(name: str, tokens: jax.Array, dim: int) -> int:
  """Returns B of tokens [B, T], or of embeddings [B, T, D] in their place.

  Raises:
    ValueError: they are neither, or there are none; the message begins with `name`.
  """
  if jnp.ndim(tokens) == 3:
    axes = "embeddings [B, T, D] in place of tokens"
    check_shape(name, "tokens", tokens, (None, None, dim), axes)
    check_floating(name, "tokens", tokens)
  else:
    check_shape(name, "tokens", tokens, (None, None), "[B, T]")
    checked_integers(name, "tokens", tokens)
  B, T = jnp.shape(tokens)[:2]
  if not B * T:
    raise ValueError(f"{name}: tokens has shape {jnp.shape(tokens)}; give at least one token.")
  return B


def check_ids(name: str, tokens: jax.Array, vocab_size: int) -> None:
  """Raises `ValueError` if values of tokens [B, T] are known and outside [0, vocab_size).

  In calls outside of `jit` and other transformations they are. From a GPU they are copied.
  """
  if not has_known_values(tokens):
    return
  known = np.asarray(tokens)
  wrong = known[(known < 0) | (known >= vocab_size)]
  if wrong.size:
    raise ValueError(
      f"{name}: tokens has the id {wrong[0]}, but the vocabulary is 0 to {vocab_size - 1}; was it "
      "encoded with another tokenizer?"
    )


def lookup(
  table: jax.Array,  # [vocab, D]
  tokens: jax.Array,  # [...] integer
) -> jax.Array:
  """table[tokens], [..., D]; NaN for an id outside [0, vocab), which gets no gradient either."""
  tokens = jnp.asarray(checked_integers("lookup", "tokens", tokens))
  return _lookup(*vary_alike((table, tokens)))


@custom_vjp
def _lookup(table, tokens):
  return table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def _forward(table, tokens):
  # An empty array carries the dtype: residuals must be arrays.
  return _lookup(table, tokens), (tokens, jnp.zeros((table.shape[0], 0), table.dtype))


def _backward(residuals, d_rows):
  tokens, like = residuals
  vocab, D = like.shape[0], d_rows.shape[-1]
  ids = tokens.reshape(-1)
  ids = jnp.where((ids >= 0) & (ids < vocab), ids, vocab)
  order = jnp.argsort(ids, stable=True)
  ids, rows = ids[order], d_rows.reshape(-1, D)[order].astype(jnp.float32)
  changes = ids[1:] != ids[:-1]
  is_first = jnp.pad(changes, (1, 0), constant_values=True)
  is_last = jnp.pad(changes, (0, 1), constant_values=True)

  def combine(left, right):
    (starts_left, sum_left), (starts_right, sum_right) = left, right
    total = jnp.where(starts_right[:, None], sum_right, sum_left + sum_right)
    return starts_left | starts_right, total

  _, sums = jax.lax.associative_scan(combine, (is_first, rows))
  # Each id's whole sum goes to its row. The other indices are beyond the table and distinct: unique
  # indices need no order.
  places = jnp.where(is_last & (ids < vocab), ids, vocab + jnp.arange(ids.size))
  d_table = jnp.zeros((vocab, D), jnp.float32)
  d_table = d_table.at[places].set(sums, mode="drop", unique_indices=True)
  return d_table.astype(like.dtype), None


_lookup.defvjp(_forward, _backward)


class Head(nnx.Module):
  """W [D, vocab] of the logits h W."""

  def __init__(self, dim: int, vocab_size: int, *, kernel_init, param_dtype, rngs: nnx.Rngs):
    self.kernel = nnx.Param(kernel_init(rngs.params(), (dim, vocab_size), param_dtype))
