"""`causal_conv1d`: public API, argument checks and dispatch."""

from typing import Literal

import jax.numpy as jnp

from lnssm_jax import typing as ty
from lnssm_jax.ops.causal_conv1d.reference import reference
from lnssm_jax.ops.causal_conv1d.sharded import sharded
from lnssm_jax.ops.causal_conv1d.types import RESULT_AXES, ConvState, Inputs, Options, init_state
from lnssm_jax.ops.core import dispatch
from lnssm_jax.ops.core.checks import check_floating, check_shape, checked_state
from lnssm_jax.ops.core.precision import accumulation_dtype
from lnssm_jax.ops.core.segments import segments_of

_NAME = "causal_conv1d"
_KERNELS = dispatch.Kernels(f"{__package__}.pallas", RESULT_AXES)
IMPLEMENTATIONS = {
  "pallas": _KERNELS.compiled,
  "reference": dispatch.Form(reference),
  "pallas_interpret": _KERNELS.interpreted,
}


@dispatch.op(init_state)
def causal_conv1d(
  x: ty.BTD,
  kernel: ty.WD,
  bias: ty.D | None = None,
  *,
  activation: Literal["silu"] | None = None,
  dtype=None,
  initial_state: ConvState | None = None,
  segment_ids: ty.Ids | None = None,
  axis_name: str | None = None,
  implementation: ty.Implementation | None = None,
) -> tuple[ty.BTD, ConvState]:
  """Depthwise causal convolution over W tokens.

      z_t = bias + sum_j kernel_j * x_{t - (W - 1) + j}        j = 0 ... W - 1
      y_t = z_t, or silu(z_t) = z_t * sigmoid(z_t)

  The last row of `kernel` belongs to the present token. Before the first token come the inputs in
  `initial_state`; no input of another document is read. Sums are float32 (float64 for float64
  inputs) and rounded once, to `dtype`. Gradients flow to all arrays, and from the returned state.

  Args:
    activation: None or "silu".
    dtype: of y; None means that of x.
    initial_state: the inputs before the first token; None means zeros.
    segment_ids: `[B, T]` integers; the state is reset where they change.
    axis_name: mesh axis of a surrounding `shard_map` that shards T, at least W - 1 tokens per
      shard; None for the whole sequence. One exchange of B (W - 1) D numbers with the neighbor.
    implementation: one of `IMPLEMENTATIONS`; README.md has their limits. None takes "pallas" where
      it is supported and preferred, otherwise "reference" (a sum of shifted inputs).

  Returns:
    y [B, T, D] and the `ConvState` after the last token.

  Raises:
    ValueError: shapes or dtypes do not agree, or `activation` is unknown; the message names the
      argument.
    NotImplementedError: the named implementation does not support these arguments.
  """
  for name, array in {"x": x, "kernel": kernel, "bias": bias}.items():
    if array is not None:
      check_floating(_NAME, name, array)
  x, kernel = jnp.asarray(x), jnp.asarray(kernel)
  bias = None if bias is None else jnp.asarray(bias)
  check_shape(_NAME, "x", x, (None,) * 3, "[B, T, D]")
  B, T, D = x.shape
  if 0 in (T, D):
    raise ValueError(f"{_NAME}: x {x.shape} has an empty axis; T >= 1 and D >= 1 are needed.")
  check_shape(_NAME, "kernel", kernel, (None, D), "[W, D]")
  W = len(kernel)
  if W == 0:
    raise ValueError(f"{_NAME}: kernel {kernel.shape} has no tokens; W >= 1 is needed.")
  if bias is not None:
    check_shape(_NAME, "bias", bias, (D,), "[D]")
  state = initial_state
  if state is not None:
    acc = accumulation_dtype(x)
    state = checked_state(_NAME, ConvState, state, (B, W - 1, D), "[B, W - 1, D]", acc)
  if activation not in (None, "silu"):
    raise ValueError(f"{_NAME}: activation={activation!r} is unknown; use 'silu' or None.")
  dtype = x.dtype if dtype is None else jnp.dtype(dtype)
  if not jnp.issubdtype(dtype, jnp.floating):
    raise ValueError(f"{_NAME}: dtype={dtype} must be floating point, as jnp.bfloat16 is.")
  return dispatch.run(
    _NAME,
    IMPLEMENTATIONS,
    Inputs(x, kernel, bias, state, segments_of(_NAME, segment_ids, B, T)),
    Options(activation == "silu", dtype),
    implementation=implementation,
    axis_name=axis_name,
    sharded=sharded,
  )
