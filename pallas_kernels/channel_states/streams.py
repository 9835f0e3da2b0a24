"""Per-token inputs of the kernels of this folder, in GMEM and as chunks in SMEM."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.channel_states.config import CHUNK
from pallas_kernels.channel_states.recurrence import Inputs
from pallas_kernels.core import boundaries

_FIRST, _NORM = 0, 1  # rows of `scalars`


class Streams(NamedTuple):
  """Keys are float32, because each number serves many channels."""

  x: Any  # [B, T, D]
  rate: Any  # [B, T, D]
  write_key: Any  # [B, T, N]
  read_key: Any  # [B, T, N]
  other_squares: Any  # [B, T, N] or None
  scalars: Any  # [B, T / CHUNK, 2, CHUNK] or None: `boundaries.as_flags`, norms of keys

  @classmethod
  def of(cls, inputs: Inputs, first: jax.Array | None) -> "Streams":
    """The arrays as the kernels load them."""

    def wide(x) -> Any:
      return None if x is None else x.astype(jnp.float32)

    scalars = None
    if first is not None or inputs.key_norm is not None:
      # By chunks, because a copy to SMEM moves a multiple of 128 bytes.
      B, T = inputs.x.shape[:2]
      zero = jnp.zeros((B, T), jnp.float32)
      flags = boundaries.as_flags(first, CHUNK)
      columns = [zero if x is None else wide(x) for x in (flags, inputs.key_norm)]
      chunked = [x.reshape(B, T // CHUNK, CHUNK) for x in columns]
      scalars = jnp.stack(chunked, axis=2)
    return cls(
      inputs.x,
      inputs.rate,
      wide(inputs.write_key),
      wide(inputs.read_key),
      wide(inputs.other_squares),
      scalars,
    )


class KernelInputs(NamedTuple):
  """Arrays of the forward kernel."""

  streams: Streams
  skip: Any  # [D]
  a: Any  # [D, N] or None
  initial: Any  # [B, D, N]


def load_is_first(streams_smem, t):
  """Whether token t of the chunk is the first of a document; only where there are boundaries."""
  return streams_smem.scalars[_FIRST, t] > 0


def _begins_document(streams_smem):
  """Whether a document begins in the chunk."""
  return streams_smem.scalars[_FIRST, 0] != 0


def in_cut(compute, streams_smem, carry, has_boundaries: bool):
  """`compute(carry, cut=)`, without a look at each token's flag where no document begins."""
  if not has_boundaries:
    return compute(carry, cut=False)
  ways = (functools.partial(compute, cut=cut) for cut in (True, False))
  return lax.cond(_begins_document(streams_smem), *ways, carry)


def load_norm(streams_smem, t):
  """The norm of token t's write key; None for a recurrence that takes none."""
  return None if streams_smem.other_squares is None else streams_smem.scalars[_NORM, t]
