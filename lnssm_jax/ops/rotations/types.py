"""Types of `rotations`: its arguments."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

CHUNK = 16  # tokens, or all of a shorter sequence


class Inputs(NamedTuple):
  """The arguments; T tokens in L chunks, which are whole where an implementation gets them."""

  keys: jax.Array  # [B, T, R, G, N]
  queries: jax.Array  # [B, T, R, G, N]
  key_offset: jax.Array  # [H, R, N]
  query_offset: jax.Array  # [H, R, N]
  pace: jax.Array  # [B, T, A], float32 at least, as all that follow
  step: jax.Array  # [B, T, H]
  weight: jax.Array  # [B, T, H]
  entering: jax.Array  # [B, L, H, A], the angles before each chunk
  keep: jax.Array  # [B, T], 0 where a document begins that is not a row's first, else 1

  AXES = {  # noqa: RUF012
    "keys": "BTRGN",
    "queries": "BTRGN",
    "key_offset": "HRN",
    "query_offset": "HRN",
    "pace": "BTA",
    "step": "BTH",
    "weight": "BTH",
    "entering": "BLHA",
    "keep": "BT",
  }
  RESULTS = ("BTHRN", "BTHRN")


class Options(NamedTuple):
  """Static arguments."""

  dtype: jnp.dtype  # of the results


def chunk_size(length: int) -> int:
  """Tokens of a chunk; a short sequence is one."""
  return min(CHUNK, length)


def whole_chunks(x: jax.Array, number: int) -> jax.Array:
  """x [B, T, ...] with zeros for the tokens that the last of so many chunks lacks."""
  more = number * chunk_size(x.shape[1]) - x.shape[1]
  return jnp.pad(x, ((0, 0), (0, more), *[(0, 0)] * (x.ndim - 2))) if more else x


def with_whole_chunks(inputs: Inputs) -> Inputs:
  """The same with zeros after the last token."""
  L = inputs.entering.shape[1]
  of_tokens = (name for name, axes in Inputs.AXES.items() if axes.startswith("BT"))
  return inputs._replace(**{name: whole_chunks(getattr(inputs, name), L) for name in of_tokens})
