"""Ops with N states per channel: what selective_scan and longhorn_scan share."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.checks import check_chunk_size, check_floating, check_shape, checked_state
from lnssm_jax.ops.core.precision import accumulation_dtype
from lnssm_jax.ops.core.segments import Segments, segments_of

RESULT_AXES = ("BTD", "BDN")  # of the output and of the state's arrays


class Options(NamedTuple):
  """Static arguments."""

  chunk_size: int | None = None


class Shared(NamedTuple):
  """The arguments that both ops have, once they are checked."""

  skip: jax.Array  # [D], in the dtype of the sums
  state: Any
  segments: Segments | None
  options: Options


def as_floating(op: str, **arrays) -> list[jax.Array]:
  """The arguments as arrays; raises `ValueError` unless all are of real floating-point dtypes."""
  for name, array in arrays.items():
    check_floating(op, name, array)
  return [jnp.asarray(array) for array in arrays.values()]


def checked(
  op: str, kind, arrays, N: int, *, skip, initial_state, segment_ids, chunk_size
) -> Shared:
  """Checks what both ops share. `arrays`: the other arguments, x `[B, T, D]` first."""
  B, T, D = arrays[0].shape
  if 0 in (T, D, N):
    raise ValueError(
      f"{op}: x has shape {(B, T, D)} and N={N}; T >= 1, D >= 1 and N >= 1 are needed."
    )
  check_chunk_size(op, chunk_size)
  if skip is None:
    acc = accumulation_dtype(*arrays)
    skip = jnp.zeros(D, acc)
  else:
    check_floating(op, "skip", skip)
    check_shape(op, "skip", skip, (D,), "[D]")
    acc = accumulation_dtype(*arrays, skip)
  state = checked_state(op, kind, initial_state, (B, D, N), "[B, D, N]", acc)
  segments = segments_of(op, segment_ids, B, T)
  return Shared(jnp.asarray(skip, acc), state, segments, Options(chunk_size))
