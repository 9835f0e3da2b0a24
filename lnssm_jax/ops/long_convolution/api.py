"""`long_convolution`: public API, argument checks and dispatch."""

import functools
from typing import Literal

import jax.numpy as jnp

from lnssm_jax import typing as ty
from lnssm_jax.ops.causal_conv1d.types import ConvState
from lnssm_jax.ops.core import dispatch
from lnssm_jax.ops.core.checks import check_chunk_size, check_floating, check_sequence, check_shape
from lnssm_jax.ops.core.precision import accumulation_dtype
from lnssm_jax.ops.core.segments import segments_of
from lnssm_jax.ops.long_convolution import chunked, facts, taps
from lnssm_jax.ops.long_convolution.exponentials import checked_exponential_kernel
from lnssm_jax.ops.long_convolution.reference import reference
from lnssm_jax.ops.long_convolution.sharded import sharded
from lnssm_jax.ops.long_convolution.types import (
  ExponentialKernel,
  ExponentialState,
  Inputs,
  Options,
  init_state,
)

_NAME = "long_convolution"


def _chunked(inputs: Inputs, options: Options):
  form = chunked if isinstance(inputs.kernel, ExponentialKernel) else taps
  return form.chunked(inputs, options)


def _taps_only(inputs: Inputs, options: Options) -> str | None:
  if isinstance(inputs.kernel, ExponentialKernel):
    return "kernel is an ExponentialKernel; pass exponential_kernel_taps(kernel, length)."
  return None


def _exponentials_only(inputs: Inputs, options: Options) -> str | None:
  if isinstance(inputs.kernel, ExponentialKernel):
    return None
  return "kernel is an array of taps; pass an ExponentialKernel."


IMPLEMENTATIONS = {
  "fft": dispatch.Form(taps.fft, _taps_only),
  "chunked": dispatch.Form(_chunked),
  "reference": dispatch.Form(reference),
  "associative": dispatch.Form(chunked.associative, _exponentials_only),
}
_run = functools.partial(dispatch.run, _NAME, IMPLEMENTATIONS, sharded=sharded)


@dispatch.op(
  init_state,
  log_decay=facts.log_decay,
  query_key=None,
  recurrence=facts.recurrence,
  decodes=False,
)
def long_convolution(
  x: ty.BTD,
  kernel: ty.LD | ExponentialKernel,
  *,
  initial_state: ConvState | ExponentialState | None = None,
  segment_ids: ty.Ids | None = None,
  axis_name: str | None = None,
  implementation: ty.Implementation | Literal["fft"] | None = None,
  chunk_size: int | None = None,
) -> tuple[ty.BTD, ConvState | ExponentialState]:
  r"""Depthwise causal convolution with a kernel of any length.

      out_t = sum_{s <= t} kernel_{t-s} x_s

  `kernel` is an array of taps, `[L, D]` with any L >= 1, zero beyond; or an `ExponentialKernel`,

      kernel_l = Re sum_n coefficient_n exp(l log_pole_n)          + direct at l = 0

  whose taps never end and whose state has N numbers per channel instead of L - 1 inputs. Its poles
  may be real or complex, Re log_pole <= 0. A real part above 0 gives a kernel that grows; it is
  computed as it is and may overflow.

  Sums are float32 (float64 if an input is) whatever the dtype of x and the kernel; `out` has the
  dtype of `x`. A single token needs no FFT. Gradients flow to `x`, the kernel, `initial_state` and
  from the returned state; those of complex arrays follow JAX's convention. Reverse mode only.

  The error of an FFT is relative to the norms of all of x and all of the kernel, not to a single
  output: an output much smaller than its neighbors is as inexact as they are, also where it comes
  before them. "chunked" takes twice the time or more for taps, and no output depends on a later
  input, not even in its last digit or by an Inf. README.md has the numbers.

  Args:
    initial_state: the state before the first token, a `ConvState` for an array of taps, an
      `ExponentialState` for an `ExponentialKernel`; None means zeros.
    segment_ids: `[B, T]` integers; the state is reset where they change.
    axis_name: mesh axis of a surrounding `shard_map` that shards T; None for the whole sequence.
      For an `ExponentialKernel` only; the exchange has B D N numbers, complex where the poles are.
    implementation: for an array "fft" (one FFT; the default; with `segment_ids` as "chunked"),
      "chunked" (a tree of products and FFTs of 2^i tokens, in time T log^2 T) or "reference" (token
      by token); for an `ExponentialKernel` "chunked" (taps inside chunks, states between
      them, in linear time; the default), "associative" (chunks of one token: holds all states) or
      "reference".
    chunk_size: tokens per chunk of an `ExponentialKernel`, a power of two; None means 64, or 128 if
      N > 32.

  Returns:
    `out` [B, T, D] and the state after the last token.

  Raises:
    ValueError: shapes or dtypes do not agree; the message names the argument.
    NotImplementedError: the named implementation does not support this kind of kernel; or
      `axis_name` with an array of taps, whose every output may read all inputs.

  Sources: the long convolution by FFT, S4 (Gu et al. 2022) and Hyena (Poli et al. 2023); sums of
  exponentials, DSS (Gupta et al. 2022), S4D (Gu et al. 2022), TNN (Qin et al. 2023).
  """
  x = jnp.asarray(x)
  check_floating(_NAME, "x", x)
  B, T, D = check_sequence(_NAME, "x", x)
  check_chunk_size(_NAME, chunk_size)
  if isinstance(kernel, ExponentialKernel):
    kernel = checked_exponential_kernel(_NAME, kernel, D, x)
    acc = jnp.finfo(kernel.log_pole.dtype).dtype
    wanted, shape, axes = ExponentialState, (B, *kernel.log_pole.shape), "[B, D, N]"
    dtype = kernel.log_pole.dtype
  else:
    kernel = jnp.asarray(kernel)
    check_floating(_NAME, "kernel", kernel)
    check_shape(_NAME, "kernel", kernel, (None, D), "[L, D]")
    if kernel.shape[0] == 0:
      raise ValueError(f"{_NAME}: kernel has shape {kernel.shape}; L >= 1 is needed.")
    acc = dtype = accumulation_dtype(x, kernel)
    wanted, shape = ConvState, (B, kernel.shape[0] - 1, D)
    axes = "[B, L - 1, D]"
  state = initial_state
  if state is not None:
    if not isinstance(state, wanted):
      kind = type(kernel).__name__ if wanted is ExponentialState else "array of taps"
      raise ValueError(
        f"{_NAME}: initial_state is a {type(state).__name__}, but the kernel is an {kind}; "
        f"pass a {wanted.__name__}."
      )
    name, array = wanted._fields[0], jnp.asarray(state[0])
    check_shape(_NAME, f"initial_state.{name}", array, shape, axes)
    if jnp.iscomplexobj(array) and not jnp.issubdtype(dtype, jnp.complexfloating):
      raise ValueError(
        f"{_NAME}: initial_state.{name} is complex, but the kernel is real; pass the real part, "
        "or make kernel.log_pole complex."
      )
    state = wanted(array.astype(dtype))
  inputs = Inputs(x, kernel, state, segments_of(_NAME, segment_ids, B, T))
  return _run(inputs, Options(acc, chunk_size), implementation=implementation, axis_name=axis_name)
