"""`causal_conv1d` and `token_shift`: public API, argument checks and dispatch."""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from lnssm_jax import typing as ty
from lnssm_jax.ops.causal_conv1d.reference import reference
from lnssm_jax.ops.causal_conv1d.sharded import sharded
from lnssm_jax.ops.causal_conv1d.types import (
  RESULT_AXES,
  SHIFT_RESULT_AXES,
  ConvState,
  Inputs,
  Options,
  ShiftInputs,
  init_state,
)
from lnssm_jax.ops.core import dispatch
from lnssm_jax.ops.core.checks import check_floating, check_sequence, check_shape, checked_state
from lnssm_jax.ops.core.explicit_axes import under_auto_axes
from lnssm_jax.ops.core.precision import accumulation_dtype, wide
from lnssm_jax.ops.core.segments import segments_of

_NAME = "causal_conv1d"
_SHIFT = "token_shift"
# Of several convolutions: their output is a tuple.
IMPLEMENTATIONS, _OF_SHIFT = (
  dispatch.Kernels(f"{__package__}.pallas", axes).with_forms(reference=reference)
  for axes in (RESULT_AXES, SHIFT_RESULT_AXES)
)


@dispatch.op(
  init_state,
  log_decay=None,
  query_key=None,
  recurrence=None,
  decodes=False,
)
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
  for name, array in {"kernel": kernel, "bias": bias}.items():
    if array is not None:
      check_floating(_NAME, name, array)
  x, kernel = _checked_input(_NAME, x), jnp.asarray(kernel)
  bias = None if bias is None else jnp.asarray(bias)
  D = x.shape[2]
  check_shape(_NAME, "kernel", kernel, (None, D), "[W, D]")
  W = len(kernel)
  if W == 0:
    raise ValueError(f"{_NAME}: kernel {kernel.shape} has no tokens; W >= 1 is needed.")
  if bias is not None:
    check_shape(_NAME, "bias", bias, (D,), "[D]")
  if activation not in (None, "silu"):
    raise ValueError(f"{_NAME}: activation={activation!r} is unknown; use 'silu' or None.")
  return dispatch.run(
    _NAME,
    IMPLEMENTATIONS,
    _inputs(_NAME, x, kernel[None], bias, None, initial_state, segment_ids),
    Options(activation == "silu", _checked_dtype(_NAME, x, dtype)),
    implementation=implementation,
    axis_name=axis_name,
    sharded=sharded,
    finish=lambda results: (results[0][0], results[1]),
  )


@under_auto_axes(results=(0, 0))
def token_shift(
  x: ty.BTD,
  weights: Sequence[ty.D],
  *,
  offsets: ty.BTS | None = None,
  dtype=None,
  initial_state: ConvState | None = None,
  segment_ids: ty.Ids | None = None,
  axis_name: str | None = None,
  implementation: ty.Implementation | None = None,
) -> tuple[tuple[ty.BTD, ...], ConvState]:
  """Interpolates each token with the one before it, once for each of S weights.

      y_t = mu * x_t + (1 - mu) * x_{t-1}                            mu in weights
      y_t = (mu - m_t) * x_t + (1 - mu + m_t) * x_{t-1}              with offsets m

  It is `causal_conv1d` with the kernel (1 - mu, mu), for all S in one pass over x: the other
  arguments, the implementations, precision and errors are those of that function.

  Args:
    weights: S vectors [D], of the present token.
    offsets: data-dependent shifts of weight to the token before, D columns for each of `weights`;
      None means zeros. Their gradient has their dtype.
    dtype: of the results; None means that of x.
    initial_state: the input before the first token, [B, 1, D]; None means zeros.

  Returns:
    S arrays [B, T, D] and the `ConvState` after the last token.

  Source: RWKV-4 (Peng et al. 2023), eqs. 11-13; offsets: RWKV-6 (Peng et al. 2024).
  """
  x = _checked_input(_SHIFT, x)
  if not weights:
    raise ValueError(f"{_SHIFT}: weights is empty; give at least one vector [D].")
  kernels = []
  for n, weight in enumerate(weights):
    check_floating(_SHIFT, f"weights[{n}]", weight)
    check_shape(_SHIFT, f"weights[{n}]", weight, x.shape[2:], "[D]")
    mu = wide(jnp.asarray(weight))
    kernels.append(jnp.stack([1 - mu, mu]))
  if offsets is not None:
    check_floating(_SHIFT, "offsets", offsets)
    offsets, (B, T, D) = jnp.asarray(offsets), x.shape
    check_shape(_SHIFT, "offsets", offsets, (B, T, len(weights) * D), "[B, T, S D]")
  inputs = _inputs(_SHIFT, x, jnp.stack(kernels), None, offsets, initial_state, segment_ids)
  return dispatch.run(
    _SHIFT,
    _OF_SHIFT,
    ShiftInputs(*inputs),
    Options(False, _checked_dtype(_SHIFT, x, dtype)),
    implementation=implementation,
    axis_name=axis_name,
    sharded=sharded,
  )


def _checked_input(op: str, x) -> jax.Array:
  check_floating(op, "x", x)
  x = jnp.asarray(x)
  check_sequence(op, "x", x)
  return x


def _checked_dtype(op: str, x, dtype) -> jnp.dtype:
  dtype = x.dtype if dtype is None else jnp.dtype(dtype)
  if not jnp.issubdtype(dtype, jnp.floating):
    raise ValueError(f"{op}: dtype={dtype} must be floating point, as jnp.bfloat16 is.")
  return dtype


def _inputs(op: str, x, kernels, bias, offsets, state, segment_ids) -> Inputs:
  B, T, D = x.shape
  if state is not None:
    shape = B, kernels.shape[1] - 1, D
    state = checked_state(op, ConvState, state, shape, "[B, W - 1, D]", accumulation_dtype(x))
  return Inputs(x, kernels, bias, offsets, state, segments_of(op, segment_ids, B, T))
