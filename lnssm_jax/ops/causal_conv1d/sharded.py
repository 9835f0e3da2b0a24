"""The convolution on one shard of a sequence: the W - 1 inputs before it come from its neighbor."""

from lnssm_jax.ops.causal_conv1d.types import ConvState, Inputs, Options
from lnssm_jax.ops.core.halo import inputs_before, of_last
from lnssm_jax.ops.core.precision import accumulation_dtype


def sharded(run, inputs: Inputs, options: Options, axis_name: str):
  """(y of this shard, state after the whole sequence)."""
  x, kernel, _, _, state, segments = inputs
  before = inputs_before(
    x.astype(accumulation_dtype(x)),
    kernel.shape[1] - 1,
    None if state is None else state.inputs,
    None if segments is None else segments.ids,
    axis_name=axis_name,
  )
  y, last = run(inputs._replace(state=ConvState(before)))
  return y, of_last(last, axis_name=axis_name)
