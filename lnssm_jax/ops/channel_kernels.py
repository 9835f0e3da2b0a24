"""How scans with N states per channel run on the Mosaic-GPU kernels: what selective_scan and
longhorn_scan share. Import this module where it is needed only (see `dispatch.kernels`).
"""

import jax
import jax.numpy as jnp

from lnssm_jax.ops import steps
from lnssm_jax.ops.checks import first_of_segment
from pallas_kernels.channel_states import decode, op, shapes

_DTYPES = (jnp.bfloat16, jnp.float32)
_MOST_STATES = 256
_MOST_ROWS = 65535


def obstacle(arrays: dict, state, chunk_size) -> str | None:
  """Why the kernels cannot run these arguments on any device, or None. `arrays` by name."""
  if chunk_size is not None:
    return f"chunk_size={chunk_size}, and the kernels choose their chunks themselves"
  for name, array in arrays.items():
    if array.dtype not in _DTYPES:
      return f"{name} has dtype {array.dtype}, and the kernels take bfloat16 and float32"
  if state.dtype != jnp.float32:
    return f"initial_state has dtype {state.dtype}, and the kernels compute in float32"
  if state.shape[-1] > _MOST_STATES:
    return f"a channel has {state.shape[-1]} states, and at most {_MOST_STATES} are supported"
  if state.shape[0] > _MOST_ROWS:
    return f"x has B={state.shape[0]}, and a grid of blocks has at most {_MOST_ROWS} along an axis"
  return None


def worthwhile(arrays: dict, state) -> bool:
  """Whether `implementation=None` prefers the kernels to XLA's form for sizes like these.

  Args:
    arrays: as for `run`, but what the kernels of a step make themselves.
    state: [B, D, N].
  """
  D, N = state.shape[1:]
  if arrays["x"].shape[1] > 1:
    return shapes.worthwhile(D)
  return takes_a_step(arrays, state) and decode.fits(D, N)


def takes_a_step(arrays: dict, state) -> bool:
  """Whether `step` runs these arguments."""
  return arrays["x"].shape[1] == 1 and decode.obstacle(arrays, state) is None


def step(cell, arrays: dict, skip, state, *, form, interpret=None):
  """`run` for T = 1 in one kernel, which updates the state in place.

  A single step lies in one segment, that of the initial state. `arrays` need not have what the cell
  makes itself (`keys_alone`). `form(arrays, skip, state)` is the same by XLA, for the gradient.
  """

  def kernel(arrays, skip, state):
    arrays = {n: x if n in cell.parameters else x[:, 0] for n, x in arrays.items()}
    out, state = decode.decode(cell, arrays | {"skip": skip}, state, interpret=interpret)
    return out[:, None], state

  return steps.with_gradient_of(form, kernel)(arrays, skip, state)


def is_cut(N: int) -> bool:
  """Whether the kernels work on N states of a channel in several groups."""
  return shapes.STATES[-1] < N


def run(cell, arrays: dict, skip, state, segments, *, parts=None, interpret=None):
  """`out` [B, T, D] and the state after the last step.

  Args:
    cell: the kernels' description of the scan.
    arrays: its arguments by the kernels' names: "x" and "rate" [B, T, D], keys [B, T, N],
      parameters [D, N], and maybe "norm" [B, T].
    skip: [D].
    state: [B, D, N] float32.
    segments: [B, T] counted from 0, or None.
    parts: into how many parts the sequence is cut; None leaves it to `shapes`.
  """
  x = arrays["x"]
  B, T, D = x.shape
  N = state.shape[2]
  width = shapes.states(N)
  groups = -(-N // width)
  parts = parts or shapes.parts(B, T, D, cell.fewest_parts)
  ends = {"T": -T % (shapes.STEPS * parts), "D": -D % shapes.CHANNELS, "N": groups * width - N}
  pad = lambda array, axes: jnp.pad(array, [(0, ends.get(axis, 0)) for axis in axes])
  keyed = {name: pad(arrays[name], "BTN") for name in cell.keys}
  keyed |= {name: pad(arrays[name], "DN") for name in cell.parameters}
  keyed["initial"] = pad(state, "BDN")
  shared = {name: pad(arrays[name], "BTD") for name in ("x", "rate")}
  if "norm" in arrays:
    shared["norm"] = pad(arrays["norm"], "BT")
  first = first_of_segment(segments)
  if first is not None:
    first = pad(first, "BT")
  skip = pad(skip, "D")

  if groups == 1:
    static = op.Static(cell, x.dtype, interpret)
    out, last = op.scan_in_parts(static, shared | keyed | {"skip": skip}, first, parts)
    return out[:, :T, :D], last[:, :D, :N]

  # Groups of states one after the other: each adds to the output in float32.
  static = op.Static(cell, jnp.dtype(jnp.float32), interpret)
  split = lambda y: jnp.moveaxis(y.reshape(*y.shape[:-1], groups, width), -2, 0)
  skips = jnp.pad(skip[None], ((0, groups - 1), (0, 0)))

  def group(total, own):
    keyed, skip = own
    out, last = op.scan_in_parts(static, shared | keyed | {"skip": skip}, first, parts)
    return total + out, last

  start = jnp.zeros_like(shared["x"], jnp.float32)
  out, last = jax.lax.scan(group, start, (jax.tree.map(split, keyed), skips))
  last = jnp.moveaxis(last, 0, -2).reshape(B, -1, groups * width)
  return out[:, :T, :D].astype(x.dtype), last[:, :D, :N]
