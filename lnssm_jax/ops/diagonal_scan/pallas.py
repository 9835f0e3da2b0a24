"""The diagonal scan on the Mosaic-GPU kernels: supported arguments, padding, the call.

Import this module where it is needed only (see `dispatch.Kernels`).
"""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.diagonal_scan.types import DiagonalState, Inputs, Options
from pallas_kernels.core import channel_grid as channels
from pallas_kernels.core.mma import of_architecture
from pallas_kernels.diagonal_scan import config, op

_DTYPES = (jnp.bfloat16, jnp.float32, jnp.complex64)
_MOST_SEQUENCES = 65535  # thread blocks along the second axis of a grid


def unsupported(inputs: Inputs, options: Options) -> str | None:
  """Why the kernels cannot run these arguments on any device, or None."""
  decay, x, state, _ = inputs
  for name, array in (("decay", decay), ("x", x), ("initial_state", state.h)):
    if array.dtype not in _DTYPES:
      return f"{name} has dtype {array.dtype}, and the kernels take bfloat16, float32, complex64"
  if not 1 <= x.shape[0] <= _MOST_SEQUENCES:
    return f"x has {x.shape[0]} sequences, and a grid of thread blocks takes 1 to {_MOST_SEQUENCES}"
  if options.chunk_size is not None:
    return f"chunk_size={options.chunk_size}, and the kernels choose their own chunks"
  return None


def preferred(inputs: Inputs, options: Options) -> bool:
  """Whether `implementation=None` takes the kernels for sizes like these.

  XLA fuses a single token into one loop. Complex numbers are split and merged by XLA, which costs
  more than the kernels themselves; together they are faster than XLA's form.
  """
  del options
  return inputs.x.shape[1] > 1 and inputs.x.shape[2] >= channels.CHANNELS


def run(
  inputs: Inputs,
  options: Options,
  *,
  sizes=None,
  interpret=None,
  num_splits: int | None = None,
  architecture: str | None = None,
):
  """`sizes`: the configuration of the kernels, `num_splits`: into how many the sequence is cut,
  `architecture`: whose copies they make; None leaves them to `config`, `channel_grid`, the device.
  """
  decay, x, state, segments = inputs
  B, T, D = x.shape
  P = num_splits or channels.num_splits(B, D, T)
  more = channels.padded_length(T, P) - T, -D % channels.CHANNELS
  pad = lambda array, *ends, **options: jnp.pad(array, [(0, 0), *((0, n) for n in ends)], **options)
  if decay.shape[:2] == (1, 1):  # a constant, or the decay of a single token
    decays = tuple(pad(y, 0, more[1])[0, 0] for y in _parts(decay.astype(_wide(decay))))
  else:
    # Padding keeps the state: a decay of 1, and nothing added.
    decays = tuple(pad(y, *more, constant_values=1 - n) for n, y in enumerate(_parts(decay)))
  xs = tuple(pad(y, *more) for y in _parts(x))
  initial = tuple(pad(y, more[1]) for y in _parts(state.h))
  reset = None
  if segments is not None:
    reset = pad(segments.first(reverse=options.reverse), more[0]).astype(jnp.int32)
  arrays = op.Inputs(decays, xs, initial)
  sizes = sizes or config.default(arrays.sizes)
  sizes.check(arrays.sizes)
  backend = of_architecture(architecture, interpret)
  static = op.Static(options.reverse, T, sizes, P, backend)
  out, last = op.diagonal_scan(static, arrays, reset)
  whole = lambda number: jax.lax.complex(*number) if len(number) == 2 else number[0]
  return whole(out)[:, :T, :D].astype(options.out_dtype), DiagonalState(whole(last)[:, :D])


def _parts(array):
  """(array,), or the real and the imaginary part of a complex one."""
  return (array.real, array.imag) if jnp.iscomplexobj(array) else (array,)


def _wide(array):
  return jnp.result_type(array.dtype, jnp.float32)
