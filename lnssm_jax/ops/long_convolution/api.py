"""The public function: its promises, the checks of its arguments, the choice of implementation."""

import jax
import jax.numpy as jnp

from lnssm_jax.ops import dispatch
from lnssm_jax.ops.checks import (
  accumulation_dtype,
  check_chunk_size,
  check_floating,
  check_shape,
  segment_index,
  vary_alike,
)
from lnssm_jax.ops.long_convolution import fft, recurrent, reference
from lnssm_jax.ops.long_convolution.checked import checked_exponential_kernel
from lnssm_jax.ops.long_convolution.state import (
  ExponentialKernel,
  ExponentialState,
  LongConvolutionState,
)

_NAME = "long_convolution"


def long_convolution(
  x: jax.Array,  # [B, T, D]
  kernel: jax.Array | ExponentialKernel,  # [L, D]
  *,
  initial_state: LongConvolutionState | ExponentialState | None = None,
  segment_ids: jax.Array | None = None,  # [B, T] integer
  implementation: str | None = None,
  chunk_size: int | None = None,
) -> tuple[jax.Array, LongConvolutionState | ExponentialState]:
  r"""The causal convolution of every channel with a kernel of any length.

      out_t = sum_{s <= t} kernel_{t-s} x_s

  `kernel` is an array of taps, `[L, D]` with any L >= 1, zero beyond; or an `ExponentialKernel`,

      kernel_l = Re sum_n coefficient_n exp(l log_pole_n)          + direct at l = 0

  whose taps never end and which needs a state of N numbers a channel instead of L - 1 inputs. Its
  poles may be real or complex, Re log_pole <= 0. A real part above 0 gives a kernel that grows; it
  is computed as it stands and may overflow.

  Sums are float32 (float64 if an input is) whatever the dtype of x and the kernel; `out` has the
  dtype of `x`. Cutting a sequence anywhere and passing the state on gives the same result as one
  call, down to one step, which needs no FFT; so does packing several sequences with `segment_ids`
  (the past is forgotten where the id changes; `initial_state` belongs to the first segment, the
  returned state to the last). Gradients flow to `x`, the kernel, `initial_state` and from the
  returned state; those of complex arrays follow JAX's convention. Reverse mode only.

  The error of an FFT is relative to the norms of all of x and all of the kernel, not to a single
  output: an output much smaller than its neighbours is as inexact as they are, also where it comes
  before them. "blocks" takes twice the time or more, and no output depends on a later input, not
  even in its last digit or by an Inf. README.md has the numbers.

  Args:
    initial_state: what the steps before the first left behind; None means nothing. A
      `LongConvolutionState` for an array of taps, an `ExponentialState` for an `ExponentialKernel`.
    implementation: for an array "fft" (one FFT; with `segment_ids` as "blocks"; what None takes),
      "blocks" (a tree of products and FFTs of 2^i steps, in time T log^2 T); for an
      `ExponentialKernel` "chunked" (taps inside chunks, states between them, in linear time; what
      None takes), "associative" (`chunked` with chunks of one step, holds all states); for both
      "reference" (one step at a time).
    chunk_size: steps in a chunk of the chunked form, a power of two; None means 64, or 128 if
      N > 32.

  Returns:
    `out` [B, T, D] and the state after the last step.

  Raises:
    ValueError: shapes or dtypes do not agree; the message names the argument.
    NotImplementedError: the named implementation cannot run this kind of kernel.

  Sources: the long convolution by FFT, S4 (Gu et al. 2022) and Hyena (Poli et al. 2023); sums of
  exponentials, DSS (Gupta et al. 2022), S4D (Gu et al. 2022), TNN (Qin et al. 2023).
  """
  args, kwargs = _checked(
    x,
    kernel,
    initial_state=initial_state,
    segment_ids=segment_ids,
    chunk_size=chunk_size,
  )
  with jax.named_scope(_NAME):
    return dispatch.choose(_NAME, implementation, args, kwargs).run(*args, **kwargs)


def _checked(x, kernel, *, initial_state=None, segment_ids=None, chunk_size=None):
  """Checks the arguments of `long_convolution` and gives them the implementations' form."""
  x = jnp.asarray(x)
  check_floating(_NAME, "x", x)
  check_shape(_NAME, "x", x, (None,) * 3, "[B, T, D]")
  B, T, D = x.shape
  if 0 in (T, D):
    raise ValueError(f"{_NAME}: x {x.shape} has an empty axis; T >= 1 and D >= 1 are needed.")
  check_chunk_size(_NAME, chunk_size)
  if isinstance(kernel, ExponentialKernel):
    kernel = checked_exponential_kernel(_NAME, kernel, D, x)
    acc = jnp.finfo(kernel.log_pole.dtype).dtype
    wanted, dtype, shape, axes = (
      ExponentialState,
      kernel.log_pole.dtype,
      (B, *kernel.log_pole.shape),
      "[B, D, N]",
    )
  else:
    kernel = jnp.asarray(kernel)
    check_floating(_NAME, "kernel", kernel)
    check_shape(_NAME, "kernel", kernel, (None, D), "[L, D]")
    if kernel.shape[0] == 0:
      raise ValueError(f"{_NAME}: kernel has shape {kernel.shape}; L >= 1 is needed.")
    acc = dtype = accumulation_dtype(x, kernel)
    wanted, shape = LongConvolutionState, (B, kernel.shape[0] - 1, D)
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
  segments = segment_index(_NAME, segment_ids, B, T)
  args = vary_alike((x, kernel, state, segments))
  return args, {"acc": acc, "chunk_size": chunk_size}


def _needs_taps(x, kernel, *args, **kwargs):
  if isinstance(kernel, ExponentialKernel):
    return "kernel is an ExponentialKernel; pass exponential_kernel_taps(kernel, length)."
  return None


def _needs_exponentials(x, kernel, *args, **kwargs):
  if isinstance(kernel, ExponentialKernel):
    return None
  return "kernel is an array of taps; pass an ExponentialKernel."


dispatch.register(
  _NAME,
  _checked,
  dispatch.Implementation("fft", fft.fft, _needs_taps),
  dispatch.Implementation("blocks", fft.blocks, _needs_taps),
  dispatch.Implementation("chunked", recurrent.chunked, _needs_exponentials),
  dispatch.Implementation("reference", reference.reference),
  dispatch.Implementation("associative", recurrent.associative, _needs_exponentials),
)
