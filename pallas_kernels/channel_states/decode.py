"""One token of a scan with N states per channel in one kernel, which updates the state in place.

The state is loaded once and stored once. 4 states of a channel per thread, so that a warp loads and
stores whole memory transactions.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.channel_states.config import THREADS, VECTOR
from pallas_kernels.channel_states.recurrence import Keys, Recurrence
from pallas_kernels.channel_states.tiles import StateTiles
from pallas_kernels.core import decode as single_token
from pallas_kernels.core import device
from pallas_kernels.core.wgmma import store_unoptimized

MAX_STATES = 64  # per channel
_MAX_LANES = 4  # threads per channel
_MAX_TILES = 4  # per CTA


class Inputs(NamedTuple):
  """Arrays of one token; bfloat16 or float32, computed in float32."""

  x: jax.Array  # [B, D]
  rate: jax.Array  # [B, D], dt or beta
  write_key: jax.Array  # [B, N], b or k
  read_key: jax.Array  # [B, N], c or q
  skip: jax.Array  # [D]
  a: jax.Array | None = None  # [D, N], of S6


_AXES = ("BD", "BD", "BN", "BN", "D", "DN")  # of the fields of `Inputs`


def unsupported(inputs: Inputs, state: jax.Array) -> str | None:
  """The reason why `decode` cannot run these arguments, or None. Shapes are taken to agree."""
  if state.shape[2] > MAX_STATES:
    return (
      f"a channel has {state.shape[2]} states, and the decode kernel takes at most {MAX_STATES}"
    )
  arrays = {n: x for n, x in inputs._asdict().items() if n != "skip" and x is not None}
  return single_token.unsupported_dtype(**arrays) or single_token.unsupported_state(state)


def fits(D: int, N: int) -> bool:
  """Whether the state needs no padding, which would copy it."""
  return _padding(D, N) == (0, 0)


def decode(
  recurrence: Recurrence,
  inputs: Inputs,
  state: jax.Array,
  *,
  tiles: int | None = None,
  interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
  """(out [B, D] in the dtype of x, state) after one token.

  The returned state uses the buffer of the argument (`input_output_aliases` of the compiled call)
  where it `fits`; otherwise all is padded with zeros outside the kernel and sliced afterwards.

  Args:
    state: float32 [B, D, N].
    tiles: tiles of channels per CTA; None takes what divides D and fills the device.
    interpret: `plgpu.InterpretGPUParams`, or None to compile.

  Raises:
    ValueError: `unsupported` has a reason, or `tiles` does not fit.
  """
  reason = unsupported(inputs, state)
  if reason is not None:
    raise ValueError(f"decode: {reason}.")
  B, D, N = state.shape
  more_channels, more_states = _padding(D, N)
  width, rows = D + more_channels, THREADS // _lanes(N)
  if tiles is None:
    # From so many on, larger CTAs cost no parallelism.
    many = 4 * device.current().sm_count
    enough = lambda n: width % (n * rows) == 0 and B * width // (n * rows) >= many
    tiles = next((n for n in (_MAX_TILES, 2) if enough(n)), 1)
  if width % (tiles * rows):
    raise ValueError(f"decode: tiles={tiles} of {rows} channels must divide D={width}.")
  run = functools.partial(_decode, recurrence, num_tiles=tiles, interpret=interpret)
  if fits(D, N):
    return run(inputs, state)
  ends = {"B": 0, "D": more_channels, "N": more_states}

  def pad(x, axes) -> Any:
    return None if x is None else single_token.pad_last(x, *(ends[axis] for axis in axes))

  padded = Inputs(*(pad(x, axes) for x, axes in zip(inputs, _AXES, strict=True)))
  out, state = run(padded, pad(state, "BDN"))
  return out[:, :D], state[:, :D, :N]


def _lanes(N):
  """Threads that share a channel of N states, 4 states each at a time."""
  return next(n for n in (1, 2, _MAX_LANES) if n >= min(-(-N // VECTOR), _MAX_LANES))


def _padding(D, N):
  """(channels, states) to add: tiles have whole rows of threads."""
  lanes = _lanes(N)
  return -D % (THREADS // lanes), -N % (VECTOR * lanes)


# Under `jit`, so that a stack of layers has one kernel.
@functools.partial(jax.jit, static_argnames=("recurrence", "num_tiles", "interpret"))
def _decode(recurrence, inputs, state, *, num_tiles, interpret):
  """`decode` for a state that fits."""
  B, D, N = state.shape
  tiles = StateTiles(N, _lanes(N), num_tiles)

  def body(ins, state_gmem, out_gmem):
    row, base = lax.axis_index("row"), lax.axis_index("cta") * tiles.channels
    # All loads first: their latencies overlap.
    states = tiles.load(state_gmem.at[row], base)
    a_reg = [None] * tiles.number if ins.a is None else tiles.load(ins.a, base)
    keys = Keys(*(tiles.load_states(ref.at[row]) for ref in (ins.write_key, ins.read_key)))
    xs, rates = (tiles.load_channels(ref.at[row], base) for ref in (ins.x, ins.rate))
    skip_reg = tiles.load_channels(ins.skip, base)
    keys, norm = recurrence.complete_keys(tiles, keys)
    for j, at in enumerate(tiles.slices(base)):
      gates = recurrence.gates(xs[j], rates[j], norm)
      decay = recurrence.decay(tiles, gates, a_reg[j], keys)
      state = decay.update(states[j], tiles.broadcast_channels(gates.write) * keys.write)
      store_unoptimized(state_gmem.at[row, at], state)
      out = tiles.dot(state, keys.read) + skip_reg[j] * xs[j]
      store_unoptimized(out_gmem.at[row, at], out.astype(out_gmem.dtype))

  # `plgpu.kernel` cannot name aliases of operands and results; a mutable reference becomes one.
  state_ref = jax.new_ref(state)
  out = plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((B, D), inputs.x.dtype),
    grid=(D // tiles.channels, B),
    grid_names=("cta", "row"),
    compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    interpret=interpret,
    kernel_name=f"{recurrence.name}_decode",
  )(inputs, state_ref)
  return out, jax.freeze(state_ref)
