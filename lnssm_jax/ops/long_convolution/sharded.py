"""Sums of exponentials on one shard of a sequence; ops/core/sequence_parallel.py has the exchange.

A shard's summary is its last state, scanned from zero.
"""

from lnssm_jax.ops.core.sequence_parallel import states
from lnssm_jax.ops.long_convolution.exponentials import exponentials
from lnssm_jax.ops.long_convolution.types import (
  ExponentialKernel,
  ExponentialState,
  Inputs,
  Options,
  init_state,
)


def sharded(run, inputs: Inputs, options: Options, axis_name: str):
  """(out of this shard, state after the whole sequence)."""
  del options
  x, kernel, initial, segments = inputs
  if not isinstance(kernel, ExponentialKernel):
    raise NotImplementedError(
      f"long_convolution: axis_name={axis_name!r} with a kernel of taps, whose every output may "
      "read all inputs; use an ExponentialKernel, or leave the time axis whole."
    )
  _, added = run(inputs._replace(state=None))
  kept = exponentials(kernel.log_pole, (x.shape[1],))[0]
  if initial is None:
    D, N = kernel.log_pole.shape
    initial = init_state(batch=len(x), dim=D, state_dim=N, dtype=kernel.log_pole.dtype)
  entering, final = states(
    axis_name,
    added,
    initial,
    lambda added, state: ExponentialState(kept * state.h + added.h),
    segments,
  )
  return run(inputs._replace(state=entering))[0], final
