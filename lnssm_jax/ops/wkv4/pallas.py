"""RWKV-4's scan on the Mosaic-GPU kernels: which arguments they take, and how they take them.

Two paths: a single step runs `decode`, which updates the state in place; more steps run `op`.
Import this module where it is needed only (see `dispatch.kernels`).
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from lnssm_jax.ops import steps
from lnssm_jax.ops.wkv4 import xla
from lnssm_jax.ops.wkv4.state import WKV4State
from pallas_kernels import channels
from pallas_kernels.wkv4 import decode, op

_MOST_SEQUENCES = 65535  # blocks along the second axis of a grid


def obstacle(k, v, decay_rate, bonus, state, keep, *, chunk_size=None):
  """Why the kernels cannot run these arguments on any device, or None."""
  del decay_rate, bonus, keep
  for name, x in (("k", k), ("v", v)):
    if x.dtype not in (jnp.bfloat16, jnp.float32):
      return f"{name} has dtype {x.dtype}, and the kernels take bfloat16 and float32"
  if state.max.dtype != jnp.float32:
    return f"the sums have dtype {state.max.dtype}, and the kernels compute in float32"
  if not 1 <= k.shape[0] <= _MOST_SEQUENCES:
    return f"k has {k.shape[0]} sequences, and a grid of blocks takes 1 to {_MOST_SEQUENCES}"
  if chunk_size is not None:
    return f"chunk_size={chunk_size}, and the kernels choose their chunks themselves"
  return None


def worthwhile(k, v, decay_rate, bonus, state, keep, **options):
  """Whether `implementation=None` prefers the kernels to XLA's form for sizes like these."""
  del decay_rate, bonus, keep, options
  T, D = k.shape[1:]
  if T > 1:
    return channels.CHANNELS <= D
  return _takes_a_step(k, v, state) and decode.fits(D)


def _takes_a_step(k, v, state):
  """Whether `decode` runs these arguments."""
  return k.shape[1] == 1 and decode.obstacle(k, v, state) is None


def run(
  k,
  v,
  decay_rate,
  bonus,
  state,
  keep,
  *,
  chunk_size=None,
  interpret=None,
  number_of_parts=None,
):
  """Arguments as in `reference.py`."""
  del chunk_size
  B, T, D = k.shape
  if _takes_a_step(k, v, state):
    # A single step lies in one segment, that of the initial state.
    step = functools.partial(_step, interpret=interpret)
    return steps.with_gradient_of(_form, step)(k, v, decay_rate, bonus, state)
  P = number_of_parts or channels.parts(B, D, T)
  later, wider = channels.padded_length(T, P) - T, -D % channels.CHANNELS
  pad = lambda x, *ends: jnp.pad(x, [(0, 0)] * (x.ndim - len(ends)) + [(0, n) for n in ends])
  forget = None
  if keep is not None:
    forget = pad(jnp.where(keep[..., 0], 0, 1).astype(jnp.int32), later)
  inputs = op.Inputs(
    *(pad(x, later, wider) for x in (k, v)),
    *(pad(x.astype(jnp.float32), wider) for x in (decay_rate, bonus)),
    *(pad(x, wider) for x in state),
  )
  out, last = op.wkv4(op.Static(T, P, interpret), inputs, forget)
  largest, numerator, denominator = (x[:, :D] for x in last)
  # The maximum is a scale that the other two are divided by; they carry the gradient.
  last = WKV4State(jax.lax.stop_gradient(largest), numerator, denominator)
  return out[:, :T, :D], last


def _step(k, v, decay_rate, bonus, state, *, interpret):
  """A single step by `decode`."""
  rates = (x.astype(jnp.float32) for x in (decay_rate, bonus))
  out, last = decode.decode(k[:, 0], v[:, 0], *rates, state, interpret=interpret)
  return out[:, None], WKV4State(*last)


def _form(k, v, decay_rate, bonus, state):
  """The same by XLA."""
  return xla.chunked(k, v, decay_rate, bonus, state, None)


interpreted = functools.partial(run, interpret=plgpu.InterpretGPUParams(detect_races=True))
