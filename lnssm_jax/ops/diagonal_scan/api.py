"""`diagonal_scan`: public API, argument checks and dispatch."""

import functools

import jax.numpy as jnp

from lnssm_jax import typing as ty
from lnssm_jax.ops.core import dispatch
from lnssm_jax.ops.core.checks import check_sequence, check_shape
from lnssm_jax.ops.core.segments import segments_of
from lnssm_jax.ops.diagonal_scan import facts
from lnssm_jax.ops.diagonal_scan.chunked import associative, chunked
from lnssm_jax.ops.diagonal_scan.reference import reference
from lnssm_jax.ops.diagonal_scan.sharded import sharded
from lnssm_jax.ops.diagonal_scan.types import (
  RESULT_AXES,
  DiagonalState,
  Inputs,
  Options,
  init_state,
)

_NAME = "diagonal_scan"
_KERNELS = dispatch.Kernels(f"{__package__}.pallas", RESULT_AXES, apart=True)
IMPLEMENTATIONS = _KERNELS.with_forms(chunked=chunked, associative=associative, reference=reference)
_run = functools.partial(dispatch.run, _NAME, IMPLEMENTATIONS, sharded=sharded)


@dispatch.op(
  init_state,
  log_decay=facts.log_decay,
  query_key=None,
  recurrence=facts.recurrence,
  decodes=False,
)
def diagonal_scan(
  decay: ty.AnyBTD | ty.AnyD,
  x: ty.AnyBTD,
  *,
  reverse: bool = False,
  initial_state: DiagonalState | None = None,
  segment_ids: ty.Ids | None = None,
  axis_name: str | None = None,
  implementation: ty.Implementation | None = None,
  chunk_size: int | None = None,
) -> tuple[ty.AnyBTD, DiagonalState]:
  r"""A linear recurrence with one number per channel, in time linear in T.

      h_t = decay_t * h_{t-1} + x_t          out = h

  `decay` is the factor itself, not its logarithm. It may be real or complex, as may `x`; the result
  is complex if either is. `[D]` is one constant per channel. With `reverse` the recurrence runs
  from the last token to the first, h_t = decay_t * h_{t+1} + x_t; `initial_state` is then the state
  after the last token, and the returned state that at the first.

  A modulus of at most 1 is usual but not required; 0 resets the state exactly. The associative
  form, and chunks of more than 32 tokens, multiply decays with each other, so the product of a
  chunk's decays must not overflow.

  Sums are float32 (complex64; 64 bit if an input is) whatever the dtype of the inputs. `out` has
  the dtype of `x` where the result is real, and is complex otherwise. Gradients flow to `decay`,
  `x`, `initial_state` and from the returned state; those of complex arguments follow JAX's
  convention, and a real argument of a complex scan gets a real gradient. Reverse mode only.

  Args:
    initial_state: the state before the first token in the direction of the scan; None means zeros.
      It belongs to the document that the scan meets first, the returned state to the last.
    segment_ids: `[B, T]` integers; the state is reset where they change.
    axis_name: mesh axis of a surrounding `shard_map` that shards T; None for the whole sequence.
      The exchange has 2 B D numbers.
    implementation: one of `IMPLEMENTATIONS`; README.md has their limits. None takes "pallas" where
      it is supported and preferred, otherwise "chunked".
    chunk_size: tokens per chunk of the chunked form; None means 16 on CPUs, 512 elsewhere. The
      kernels choose their own.

  Returns:
    `out` [B, T, D] and the `DiagonalState` after the last token in the direction of the scan.

  Raises:
    ValueError: shapes or dtypes do not agree; the message names the argument.
    NotImplementedError: the named implementation does not support these arguments.

  Sources: parallel linear recurrences, Martin and Cundy 2018; as associative scan, S5 (Smith et al.
  2023), appendix H; RG-LRU, Griffin (De et al. 2024), eq. 4.
  """
  decay, x = jnp.asarray(decay), jnp.asarray(x)
  for name, array in (("decay", decay), ("x", x)):
    if not jnp.issubdtype(array.dtype, jnp.inexact):
      raise ValueError(
        f"{_NAME}: {name} has dtype {array.dtype}; it must be floating point or complex "
        f"(cast it, e.g. {name}.astype(jnp.float32))."
      )
  B, T, D = check_sequence(_NAME, "x", x)
  if decay.shape not in ((D,), x.shape):
    raise ValueError(
      f"{_NAME}: decay has shape {decay.shape}, but [B, T, D] = {list(x.shape)} or [D] = {[D]} "
      "is needed."
    )
  if decay.ndim == 1:
    decay = decay.reshape(1, 1, D)
  if chunk_size is not None and chunk_size < 1:
    raise ValueError(f"{_NAME}: chunk_size={chunk_size} must be at least 1.")

  sums = jnp.result_type(jnp.float32, decay.dtype, x.dtype)
  complex_sums = jnp.issubdtype(sums, jnp.complexfloating)
  state = init_state(batch=B, dim=D, dtype=sums)
  if initial_state is not None:
    h = jnp.asarray(initial_state.h)
    check_shape(_NAME, "initial_state.h", h, (B, D), "[B, D]")
    if jnp.iscomplexobj(h) and not complex_sums:
      raise ValueError(
        f"{_NAME}: initial_state.h is complex, but decay and x are real; make x complex "
        "(x.astype(jnp.complex64)) or pass the real part."
      )
    state = DiagonalState(h.astype(sums))
  inputs = Inputs(decay, x, state, segments_of(_NAME, segment_ids, B, T))
  options = Options(bool(reverse), sums if complex_sums else x.dtype, chunk_size)
  return _run(inputs, options, implementation=implementation, axis_name=axis_name)
