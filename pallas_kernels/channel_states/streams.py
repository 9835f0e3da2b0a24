"""Per-token inputs of the kernels of this folder, in GMEM and as chunks in SMEM."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.channel_states.config import CHUNK
from pallas_kernels.channel_states.recurrence import Inputs

_FIRST, _NORM = 0, 1  # rows of `scalars`


class Streams(NamedTuple):
  """Keys are float32, because each number serves many channels."""

  x: Any  # [B, T, D]
  rate: Any  # [B, T, D]
  write_key: Any  # [B, T, N]
  read_key: Any  # [B, T, N]
  other_squares: Any  # [B, T, N] or None
  scalars: Any  # [B, T / CHUNK, 2, CHUNK] or None: flags of first tokens, norms of keys

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
      columns = [zero if x is None else wide(x) for x in (first, inputs.key_norm)]
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


def load_norm(streams_smem, t):
  """The norm of token t's write key; None for a recurrence that takes none."""
  return None if streams_smem.other_squares is None else streams_smem.scalars[_NORM, t]
