"""RWKV-4's scan on the Mosaic-GPU kernels: which arguments they support, and how they run them.

Two kernels: `decode` runs a single token and updates the state in place, `op` the others.
README.md has the limits. Import this module where it is needed only (see `dispatch.Kernels`).
"""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core import single_step
from lnssm_jax.ops.wkv4.chunked import chunked
from lnssm_jax.ops.wkv4.types import Inputs, Options, WKV4State
from pallas_kernels.core import channel_grid as channels
from pallas_kernels.core.mma import of_architecture
from pallas_kernels.wkv4 import config, decode, op

_MOST_SEQUENCES = 65535  # blocks along the second axis of a grid


def unsupported(inputs: Inputs, options: Options) -> str | None:
  """Why the kernels cannot run these arguments on any device, or None."""
  for name, x in (("k", inputs.k), ("v", inputs.v)):
    if x.dtype not in (jnp.bfloat16, jnp.float32):
      return f"{name} has dtype {x.dtype}, and the kernels take bfloat16 and float32"
  if inputs.state.max.dtype != jnp.float32:
    return f"the sums have dtype {inputs.state.max.dtype}, and the kernels compute in float32"
  batch = inputs.k.shape[0]
  if not 1 <= batch <= _MOST_SEQUENCES:
    return f"k has {batch} sequences, and a grid of blocks takes 1 to {_MOST_SEQUENCES}"
  if options.chunk_size is not None:
    return f"chunk_size={options.chunk_size}, and the kernels choose their chunks themselves"
  return None


def preferred(inputs: Inputs, options: Options) -> bool:
  """Whether `implementation=None` prefers the kernels to XLA's form for sizes like these."""
  del options
  T, D = inputs.k.shape[1:]
  if T > 1:
    return channels.CHANNELS <= D
  return _decodes(inputs) and decode.fits(D)


def _decodes(inputs: Inputs) -> bool:
  """Whether `decode` runs these arguments."""
  k, v = inputs.k, inputs.v
  return k.shape[1] == 1 and decode.unsupported(k, v, inputs.state) is None


def run(
  inputs: Inputs,
  options: Options,
  *,
  sizes=None,
  interpret=None,
  num_splits: int | None = None,
  architecture: str | None = None,
) -> tuple[jax.Array, WKV4State]:
  """The output and the last state.

  Args:
    sizes: the configuration of the kernels for many tokens; None takes that of the table.
    num_splits: into how many splits the sequence is cut for the passes over time; None leaves
      it to `channels`.
    architecture: whose copies the kernels make; None takes those of the device.
  """
  k, v, decay_rate, bonus, state, segments = inputs
  B, T, D = k.shape
  if _decodes(inputs):
    return single_step.run(_step, chunked, inputs, options, interpret=interpret)
  P = num_splits or channels.num_splits(B, D, T)
  later, wider = channels.padded_length(T, P) - T, -D % channels.CHANNELS
  pad = lambda x, *ends: jnp.pad(x, [(0, 0)] * (x.ndim - len(ends)) + [(0, n) for n in ends])
  reset = None
  if segments is not None:
    reset = pad(segments.first().astype(jnp.int32), later)
  padded = op.Inputs(
    *(pad(x, later, wider) for x in (k, v)),
    *(pad(x.astype(jnp.float32), wider) for x in (decay_rate, bonus)),
    *(pad(x, wider) for x in state),
  )
  sizes = sizes or config.default(padded.sizes)
  sizes.check(padded.sizes)
  backend = of_architecture(architecture, interpret)
  out, last = op.wkv4(op.Static(T, sizes, P, backend), padded, reset)
  largest, numerator, denominator = (x[:, :D] for x in last)
  # The maximum is a scale that the other two are divided by; they carry the gradient.
  last = WKV4State(jax.lax.stop_gradient(largest), numerator, denominator)
  return out[:, :T, :D], last


def _step(inputs: Inputs, *, options: Options, interpret):
  """A single token by `decode`."""
  del options
  k, v, decay_rate, bonus, state, _ = inputs
  rate, bonus = decay_rate.astype(jnp.float32), bonus.astype(jnp.float32)
  out, last = decode.decode(k[:, 0], v[:, 0], rate, bonus, state, interpret=interpret)
  return out[:, None], WKV4State(*last)
