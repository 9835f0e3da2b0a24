"""One step of a scan with N states per channel in one kernel: the state is read once and written
once, in place. `cell` is the scan, as in `forward.py`.

4 states of a channel to a thread, so that a warp reads and writes whole lines of memory.
"""

import functools

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import chip, steps
from pallas_kernels.channel_states.tiles import THREADS, VECTOR, Tiles
from pallas_kernels.tensor_core import store_anywhere

WIDEST = 64  # states of a channel
_MOST_LANES = 4  # threads of a channel
_MOST_TILES = 4  # of a block
_BUSY = 4 * chip.MULTIPROCESSORS  # blocks from which on larger ones cost no parallelism


def obstacle(arrays: dict, state) -> str | None:
  """Why `decode` cannot run these arguments, or None. Shapes are taken to agree.

  Args:
    arrays: as for `decode`, but "skip".
    state: [B, D, N].
  """
  if state.shape[2] > WIDEST:
    return f"a channel has {state.shape[2]} states, and a step takes at most {WIDEST}"
  return steps.dtype_obstacle(**arrays) or steps.state_obstacle(state)


def fits(D: int, N: int) -> bool:
  """Whether the state needs no padding, which would copy it."""
  more_channels, more_states = _padding(D, N)
  return not more_channels and not more_states


def decode(cell, arrays, state, *, tiles=None, interpret=None):
  """(out [B, D] in the dtype of x, state) after one step.

  The returned state uses the buffer of the argument (`input_output_aliases` of the compiled call)
  where it `fits`; otherwise all is padded with zeros outside the kernel and cut afterwards.

  Args:
    cell: the scan; its `keys` and `parameters` name what it needs. `exact`.
    arrays: "x", "rate" [B, D]; the cell's keys [B, N], those that it can make itself may be
      missing; its parameters [D, N] and "skip" [D]. bfloat16 or float32, computed in float32.
    state: float32 [B, D, N].
    tiles: tiles of channels in a block; None takes what fits D and fills the device.
    interpret: `plgpu.InterpretGPUParams`, or None to compile.

  Raises:
    ValueError: `obstacle` has something to say, or `tiles` does not fit.
  """
  reason = obstacle({n: x for n, x in arrays.items() if n != "skip"}, state)
  if reason is not None:
    raise ValueError(f"decode: {reason}.")
  (B, D, N), (more_channels, more_states) = state.shape, _padding(*state.shape[1:])
  axes = dict.fromkeys(cell.keys, "BN") | dict.fromkeys(cell.parameters, "DN")
  axes |= {"x": "BD", "rate": "BD", "skip": "D"}
  ends = {"B": 0, "D": more_channels, "N": more_states}
  wide, rows = D + more_channels, THREADS // _lanes(N)
  if tiles is None:
    enough = lambda n: wide % (n * rows) == 0 and B * wide // (n * rows) >= _BUSY
    tiles = next((n for n in (_MOST_TILES, 2) if enough(n)), 1)
  if wide % (tiles * rows):
    raise ValueError(f"decode: tiles={tiles} of {rows} channels must divide D={wide}.")
  options = {"tiles": tiles, "interpret": interpret}
  if more_channels or more_states:
    pad = lambda x, axes: steps.padded(x, *(ends[axis] for axis in axes))
    arrays = {name: pad(x, axes[name]) for name, x in arrays.items()}
    out, state = _decode(cell, arrays, pad(state, "BDN"), **options)
    return out[:, :D], state[:, :D, :N]
  return _decode(cell, arrays, state, **options)


def _lanes(N):
  """Threads that share a channel of N states, 4 states each at a time."""
  return next(n for n in (1, 2, _MOST_LANES) if n >= min(-(-N // VECTOR), _MOST_LANES))


def _padding(D, N):
  """(channels, states) to add: tiles have whole rows of threads."""
  lanes = _lanes(N)
  return -D % (THREADS // lanes), -N % (VECTOR * lanes)


# Under `jit`, so that a stack of layers has one kernel.
@functools.partial(jax.jit, static_argnames=("cell", "tiles", "interpret"))
def _decode(cell, arrays, state, *, tiles, interpret):
  """`decode` for a state that fits."""
  B, D, N = state.shape
  form = Tiles(N, _lanes(N), tiles)

  def body(inputs, state_ref, out_ref):
    row, base = lax.axis_index("row"), lax.axis_index("block") * form.channels
    # All loads first: they travel together.
    states = form.load(state_ref.at[row], base)
    parameters = cell.tiles(form, inputs, base)
    keys = {name: form.states(inputs[name].at[row]) for name in cell.keys if name in inputs}
    xs, rates = (form.vectors(inputs[name].at[row], base) for name in ("x", "rate"))
    skip = form.vectors(inputs["skip"], base)
    write, read = cell.keys[:2]
    keys, scalars = cell.keys_alone(form, keys)
    for j, place in enumerate(form.places(base)):
      gates = cell.gates(xs[j], rates[j], scalars)
      decay = cell.decay(form, gates, parameters[j], keys)
      state = cell.after(decay, states[j], form.across(gates.write) * keys[write])
      store_anywhere(state_ref.at[row, place], state)
      out = form.sum_of(state, keys[read]) + skip[j] * xs[j]
      store_anywhere(out_ref.at[row, place], out.astype(out_ref.dtype))

  # `plgpu.kernel` has no way to name aliases; a mutable reference becomes one.
  state_ref = jax.new_ref(state)
  out = plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((B, D), arrays["x"].dtype),
    grid=(D // form.channels, B),
    grid_names=("block", "row"),
    compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    interpret=interpret,
    kernel_name=f"{cell.name}_decode",
  )(arrays, state_ref)
  return out, jax.freeze(state_ref)
