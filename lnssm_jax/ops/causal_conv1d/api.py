"""The public function: its promises, the checks of its arguments, the choice of implementation."""

import jax
import jax.numpy as jnp

from lnssm_jax.ops import dispatch, per_device
from lnssm_jax.ops.causal_conv1d import xla
from lnssm_jax.ops.checks import (
  accumulation_dtype,
  check_floating,
  check_shape,
  segment_index,
  vary_alike,
)

_NAME = "causal_conv1d"


def causal_conv1d(
  x: jax.Array,  # [B, T, D]
  kernel: jax.Array,  # [W, D], its last row for the present step
  bias: jax.Array | None = None,  # [D]
  *,
  activation: str | None = None,
  dtype=None,
  initial_state: jax.Array | None = None,  # [B, W - 1, D]
  segment_ids: jax.Array | None = None,  # [B, T] integer
  implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Depthwise causal convolution of W steps, and the inputs that later steps will need.

      z_t = bias + sum_j kernel_j * x_{t - (W - 1) + j}        j = 0 ... W - 1
      y_t = z_t, or silu(z_t) = z_t * sigmoid(z_t)

  Before the first step stand the inputs in `initial_state`, oldest first (zeros if None); they
  belong to the first segment. Across a segment's start nothing is read. Sums are float32 (float64
  for float64 inputs) and rounded once, to `dtype`. Cutting a sequence anywhere and passing the
  state on gives the same result as one call. Gradients flow to all arrays, and from the returned
  state.

  Args:
    activation: None or "silu".
    dtype: of y; None means that of x.
    implementation: "pallas" (a kernel; a Hopper GPU, x and y bfloat16 or float32, W <= 4), "xla"
      (any device and arguments), or "pallas_interpret" (the kernel on a CPU, slowly, to test it).
      None takes "pallas" where it can run and is known to be faster (T > 1 and D a multiple of 128;
      with several devices inside `shard_map`, or with a mesh that `per_device` knows), otherwise
      "xla".

  Returns:
    y [B, T, D] and the last W - 1 inputs [B, W - 1, D], with zeros for those before the last
    segment, float32 (float64 for float64 inputs).

  Raises:
    ValueError: shapes or dtypes do not agree, or `activation` is unknown; the message names the
      argument.
    NotImplementedError: the named implementation cannot run these arguments.
  """
  args, kwargs = _checked(
    x,
    kernel,
    bias,
    activation=activation,
    dtype=dtype,
    initial_state=initial_state,
    segment_ids=segment_ids,
  )
  with jax.named_scope(_NAME):
    return dispatch.choose(_NAME, implementation, args, kwargs).run(*args, **kwargs)


def _checked(
  x, kernel, bias=None, *, activation=None, dtype=None, initial_state=None, segment_ids=None
):
  """Checks the arguments of `causal_conv1d` and gives them the implementations' form."""
  arrays = {"x": x, "kernel": kernel, "bias": bias, "initial_state": initial_state}
  for name, array in arrays.items():
    if array is not None:
      check_floating(_NAME, name, array)
  x, kernel = jnp.asarray(x), jnp.asarray(kernel)
  bias, state = (None if y is None else jnp.asarray(y) for y in (bias, initial_state))
  check_shape(_NAME, "x", x, (None,) * 3, "[B, T, D]")
  B, T, D = x.shape
  if 0 in (T, D):
    raise ValueError(f"{_NAME}: x {x.shape} has an empty axis; T >= 1 and D >= 1 are needed.")
  check_shape(_NAME, "kernel", kernel, (None, D), "[W, D]")
  W = len(kernel)
  if W == 0:
    raise ValueError(f"{_NAME}: kernel {kernel.shape} has no steps; W >= 1 is needed.")
  if bias is not None:
    check_shape(_NAME, "bias", bias, (D,), "[D]")
  if state is not None:
    check_shape(_NAME, "initial_state", state, (B, W - 1, D), "[B, W - 1, D]")
    state = state.astype(accumulation_dtype(x))
  if activation not in (None, "silu"):
    raise ValueError(f"{_NAME}: activation={activation!r} is unknown; use 'silu' or None.")
  dtype = x.dtype if dtype is None else jnp.dtype(dtype)
  if not jnp.issubdtype(dtype, jnp.floating):
    raise ValueError(f"{_NAME}: dtype={dtype} must be floating point, as jnp.bfloat16 is.")
  segments = segment_index(_NAME, segment_ids, B, T)
  args = vary_alike((x, kernel, bias, state, segments))
  return args, {"silu": activation == "silu", "dtype": dtype}


_LAYOUT = per_device.Layout(("BTD", "WD", "D", "BWD", "BT"), ("BTD", "BWD"))
_COMPILED, _INTERPRETED = dispatch.kernels(f"{__package__}.pallas", _LAYOUT)

dispatch.register(
  _NAME, _checked, _COMPILED, dispatch.Implementation("xla", xla.shifted), _INTERPRETED
)
