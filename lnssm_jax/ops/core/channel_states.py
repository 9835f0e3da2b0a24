"""Ops with N states per channel: what selective_scan and longhorn_scan share."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.checks import check_chunk_size, check_floating, check_shape, checked_state
from lnssm_jax.ops.core.precision import accumulation_dtype, wide
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


class Rate(NamedTuple):
  """A rate per token and channel, and what it was made of where the op has made it."""

  values: jax.Array  # [B, T, D]
  logits: jax.Array | None = None  # [B, T, D]
  bias: jax.Array | None = None  # [D], float32 at least


def rate(
  op: str,
  name: str,
  given: jax.Array,
  bias: jax.Array | None,
  activation: Callable[[jax.Array], jax.Array] | None,
  flag: str,
) -> Rate:
  """The rates: `given`, or with an activation that of `given` + bias, in float32 at least.

  Args:
    name: of the argument `given`, [B, T, D]; the bias is `name`_bias.
    flag: the argument that asks for the activation.

  Raises:
    ValueError: a bias without an activation, or of another shape.
  """
  if activation is None:
    if bias is not None:
      raise ValueError(
        f"{op}: {name}_bias has shape {jnp.shape(bias)}, but {name} is used as it is; add "
        f"{flag}=True, or leave {name}_bias out."
      )
    return Rate(given)
  D = given.shape[-1]
  if bias is None:
    bias = jnp.zeros(D, jnp.float32)
  check_floating(op, f"{name}_bias", bias)
  check_shape(op, f"{name}_bias", bias, (D,), "[D] of x")
  bias = wide(jnp.asarray(bias))
  return Rate(activation(wide(given) + bias), given, bias)


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
