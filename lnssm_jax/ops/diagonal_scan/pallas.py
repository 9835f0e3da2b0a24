"""The diagonal scan on the Mosaic-GPU kernels: which arguments they take, and how they take them.

Import this module where it is needed only (see `dispatch.kernels`).
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from lnssm_jax.ops.diagonal_scan.state import DiagonalState
from pallas_kernels import channels
from pallas_kernels.diagonal_scan import op

_DTYPES = (jnp.bfloat16, jnp.float32, jnp.complex64)
_MOST_SEQUENCES = 65535  # blocks along the second axis of a grid


def obstacle(decay, x, state, keep, *, reverse, out_dtype, chunk_size=None):
  """Why the kernels cannot run these arguments on any device, or None."""
  del keep, reverse, out_dtype
  for name, array in (("decay", decay), ("x", x), ("initial_state", state.h)):
    if array.dtype not in _DTYPES:
      return f"{name} has dtype {array.dtype}, and the kernels take bfloat16, float32, complex64"
  if not 1 <= x.shape[0] <= _MOST_SEQUENCES:
    return f"x has {x.shape[0]} sequences, and a grid of blocks takes 1 to {_MOST_SEQUENCES}"
  if chunk_size is not None:
    return f"chunk_size={chunk_size}, and the kernels choose their chunks themselves"
  return None


def worthwhile(decay, x, state, keep, **options):
  """Whether `implementation=None` prefers the kernels to XLA's form for sizes like these.

  A single step is one fused loop of XLA's. Complex numbers are taken apart and joined by XLA, which
  costs more than the kernels themselves; together they are faster than its own form.
  """
  del decay, state, keep, options
  return x.shape[1] > 1 and x.shape[2] >= channels.CHANNELS


def run(
  decay,
  x,
  state,
  keep,
  *,
  reverse,
  out_dtype,
  chunk_size=None,
  interpret=None,
  number_of_parts=None,
):
  """Arguments as in `reference.py`."""
  del chunk_size
  B, T, D = x.shape
  P = number_of_parts or channels.parts(B, D, T)
  more = channels.padded_length(T, P) - T, -D % channels.CHANNELS
  pad = lambda array, *ends, **options: jnp.pad(array, [(0, 0), *((0, n) for n in ends)], **options)
  if decay.shape[:2] == (1, 1):  # a constant, or the decay of a single step
    decays = tuple(pad(y, 0, more[1])[0, 0] for y in _parts(decay.astype(_wide(decay))))
  else:
    # The steps behind the end keep the state: a decay of 1, and nothing added.
    decays = tuple(pad(y, *more, constant_values=1 - n) for n, y in enumerate(_parts(decay)))
  xs = tuple(pad(y, *more) for y in _parts(x))
  initial = tuple(pad(y, more[1]) for y in _parts(state.h))
  forget = None if keep is None else pad(jnp.where(keep[..., 0], 0, 1), more[0]).astype(jnp.int32)
  inputs = op.Inputs(decays, xs, initial)
  out, last = op.diagonal_scan(op.Static(reverse, T, P, interpret), inputs, forget)
  whole = lambda number: jax.lax.complex(*number) if len(number) == 2 else number[0]
  return whole(out)[:, :T, :D].astype(out_dtype), DiagonalState(whole(last)[:, :D])


interpreted = functools.partial(run, interpret=plgpu.InterpretGPUParams(detect_races=True))


def _parts(array):
  """(array,), or the real and the imaginary part of a complex one."""
  return (array.real, array.imag) if jnp.iscomplexobj(array) else (array,)


def _wide(array):
  return jnp.result_type(array.dtype, jnp.float32)
