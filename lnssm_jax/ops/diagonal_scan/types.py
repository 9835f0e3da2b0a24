"""Types of `diagonal_scan`: its recurrent state, and its arguments once they are checked."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax import typing as ty
from lnssm_jax.ops.core.segments import Segments
from lnssm_jax.ops.core.spmd import with_axes
from lnssm_jax.ops.core.states import register_state


@register_state
class DiagonalState(NamedTuple):
  """Recurrent state after the last token. float32, complex64 for complex scans (or 64 bit)."""

  h: ty.AnyBD  # the last h in the direction of the scan


@with_axes
class Inputs(NamedTuple):
  """The arguments in the form that every implementation takes."""

  decay: Annotated[jax.Array, "BTD"]  # or [1, 1, D]
  x: Annotated[jax.Array, "BTD"]
  state: Annotated[DiagonalState, "BD"]  # in the dtype of the sums
  segments: Annotated[Segments | None, "BT"]

  def keep(self, *, reverse: bool) -> jax.Array | None:
    """[B, T, 1]: False where the state is reset before a token; None: it never is."""
    if self.segments is None:
      return None
    return ~self.segments.first(reverse=reverse)[..., None]


RESULT_AXES = ("BTD", "BD")  # of the output and of the state's arrays


class Options(NamedTuple):
  """Static arguments."""

  reverse: bool
  out_dtype: jnp.dtype
  chunk_size: int | None = None


def init_state(*, batch: int, dim: int, dtype=jnp.float32) -> DiagonalState:
  """The empty state for `dim` channels: zeros. Complex scans need a complex `dtype`."""
  return DiagonalState(jnp.zeros((batch, dim), dtype))
