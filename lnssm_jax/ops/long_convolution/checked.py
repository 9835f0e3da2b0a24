"""Checks of kernels at the public boundary."""

import jax.numpy as jnp

from lnssm_jax.ops.checks import check_floating, check_shape
from lnssm_jax.ops.long_convolution.state import ExponentialKernel


def checked_exponential_kernel(
  function: str, kernel: ExponentialKernel, width: int | None, *others
) -> ExponentialKernel:
  """The kernel with arrays of one precision, that of `others` too, at least float32.

  Where the poles are real the exponentials are, and only the real part of a coefficient counts.

  Raises:
    ValueError: shapes or dtypes do not agree; the message names the field.
  """
  log_pole, coefficient = jnp.asarray(kernel.log_pole), jnp.asarray(kernel.coefficient)
  for name, x in (("log_pole", log_pole), ("coefficient", coefficient)):
    if not jnp.issubdtype(x.dtype, jnp.inexact):
      raise ValueError(
        f"{function}: kernel.{name} has dtype {x.dtype}; it must be floating point or complex."
      )
  check_shape(function, "kernel.log_pole", log_pole, (width, None), "[D, N]")
  D, N = log_pole.shape
  if N == 0:
    raise ValueError(f"{function}: kernel.log_pole has shape {(D, N)}; N >= 1 is needed.")
  check_shape(function, "kernel.coefficient", coefficient, (D, N), "[D, N] of kernel.log_pole")
  direct = kernel.direct
  if direct is not None:
    check_floating(function, "kernel.direct", direct)
    check_shape(function, "kernel.direct", direct, (D,), "[D]")
    others = (*others, direct)
  reals = (jnp.finfo(jnp.result_type(x)).dtype for x in (log_pole, coefficient, *others))
  acc = jnp.result_type(jnp.float32, *reals)
  dtype = jnp.result_type(acc, jnp.complex64) if jnp.iscomplexobj(log_pole) else acc
  if jnp.iscomplexobj(coefficient) and not jnp.iscomplexobj(log_pole):
    coefficient = coefficient.real
  return ExponentialKernel(
    log_pole.astype(dtype),
    coefficient.astype(dtype),
    None if direct is None else jnp.asarray(direct, acc),
  )
