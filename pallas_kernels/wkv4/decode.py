"""One token of WKV-4 in one kernel, which updates the state in place.

XLA makes several loops of the same update: its results, the output and three arrays of the state,
are read by one another.
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core import channel_grid as grid
from pallas_kernels.core import decode as single_token
from pallas_kernels.core.channel_grid import CHANNELS
from pallas_kernels.core.wgmma import Backend
from pallas_kernels.wkv4 import update
from pallas_kernels.wkv4.update import StateRows


def unsupported(k: jax.Array, v: jax.Array, state: StateRows) -> str | None:
  """The reason why `decode` cannot run these arguments, or None. Shapes are taken to agree."""
  reasons = (single_token.unsupported_state(x) for x in state)
  return single_token.unsupported_dtype(k=k, v=v) or next(
    (reason for reason in reasons if reason), None
  )


def fits(D: int) -> bool:
  """Whether the state needs no padding, which would copy it."""
  return D % CHANNELS == 0


def decode(
  k: jax.Array,
  v: jax.Array,
  decay_rate: jax.Array,
  bonus: jax.Array,
  state: StateRows,
  *,
  interpret: Any = None,
) -> tuple[jax.Array, StateRows]:
  """(out [B, D] in the dtype of v, state) after one token.

  The returned state uses the buffers of the argument if D is a multiple of 128; otherwise all is
  padded with zeros outside the kernel and sliced afterwards.

  Args:
    k, v: [B, D]; bfloat16 or float32, computed in float32.
    decay_rate, bonus: float32 [D].
    state: (max, numerator, denominator), float32 [B, D] each.
    interpret: `plgpu.InterpretGPUParams`, or None to compile.

  Raises:
    ValueError: `unsupported` has a reason.
  """
  reason = unsupported(k, v, state)
  if reason is not None:
    raise ValueError(f"decode: {reason}.")
  D = k.shape[-1]
  arrays = k, v, decay_rate, bonus, tuple(state)
  if fits(D):
    return _decode(*arrays, backend=Backend(interpret))
  padded = jax.tree.map(lambda x: single_token.pad_last(x, -D % CHANNELS), arrays)
  return jax.tree.map(lambda x: x[:, :D], _decode(*padded, backend=Backend(interpret)))


# Under `jit`, so that a stack of layers has one kernel.
@functools.partial(jax.jit, static_argnames="backend")
def _decode(k, v, decay_rate, bonus, state, *, backend):
  """`decode` for whole CTAs of channels."""
  B, D = k.shape

  def body(k_gmem, v_gmem, rate_gmem, bonus_gmem, state_gmem, out_gmem):
    row, at = lax.axis_index("row"), pl.ds(lax.axis_index("cta") * CHANNELS, CHANNELS)
    # All loads first: their latencies overlap.
    before = [grid.load_row(x.at[row, at]) for x in state_gmem]
    key, value = (grid.load_row(x.at[row, at]) for x in (k_gmem, v_gmem))
    rate, bonus = (grid.load_row(x.at[at]) for x in (rate_gmem, bonus_gmem))
    state = update.State.of_rows(*before)
    past, present = update.read_weights(state, key, bonus, backend)
    _, numerator, denominator = before
    total = update.reciprocal(past * denominator + present, backend)
    grid.store_row_gmem(out_gmem.at[row, at], (past * numerator + present * value) * total)
    after, _ = update.advance(state, key, value, rate, backend)
    for ref, x in zip(state_gmem, after.rows(), strict=True):
      grid.store_row_gmem(ref.at[row, at], x)

  # `plgpu.kernel` cannot name aliases of operands and results; mutable references become some.
  state_refs = tuple(jax.new_ref(x) for x in state)
  out = plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((B, D), v.dtype),
    grid=(D // CHANNELS, B),
    grid_names=("cta", "row"),
    compiler_params=grid.COMPILER_PARAMS,
    interpret=backend.interpret,
    kernel_name="wkv4_decode",
  )(k, v, decay_rate, bonus, state_refs)
  return out, tuple(jax.freeze(x) for x in state_refs)
