"""Types of `rotations`: its arguments."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.spmd import axes_of, with_axes

CHUNK = 16  # tokens, or all of a shorter sequence


@with_axes
class Inputs(NamedTuple):
  """The arguments; T tokens in L chunks, which are whole where an implementation gets them."""

  keys: Annotated[jax.Array, "BTRGN"]
  queries: Annotated[jax.Array, "BTRGN"]
  key_offset: Annotated[jax.Array, "HRN"]
  query_offset: Annotated[jax.Array, "HRN"]
  pace: Annotated[jax.Array, "BTA"]  # float32 at least, as all that follow
  step: Annotated[jax.Array, "BTH"]
  weight: Annotated[jax.Array, "BTH"]
  entering: Annotated[jax.Array, "BLHA"]  # the angles before each chunk
  keep: Annotated[jax.Array, "BT"]  # 0 where a document begins that is not a row's first, else 1
  RESULTS = ("BTRHN", "BTRHN")


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
  of_tokens = (name for name, axes in axes_of(Inputs).items() if axes.startswith("BT"))
  return inputs._replace(**{name: whole_chunks(getattr(inputs, name), L) for name in of_tokens})
