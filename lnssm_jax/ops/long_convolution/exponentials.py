"""Sums of exponentials: argument checks, exp(l p) for integer l to full precision, and the taps.

The rounding of l p, of up to l |Im p| / 2 units, would be an error of the phase; and the rounding
of exp(p) grows with l when it is multiplied. So l p is carried as an unevaluated sum of two floats
(Dekker 1971), the phase in turns, of which whole turns are removed exactly.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax.ops.core.checks import check_floating, check_shape
from lnssm_jax.ops.core.precision import two_product, two_sum
from lnssm_jax.ops.long_convolution.types import ExponentialKernel

_TURN = (6.283185307179586, 2.4492935982947064e-16)  # 2 pi
_TURNS_PER_RADIAN = (0.15915494309189535, -9.839338337591243e-18)  # 1 / (2 pi)
_LOG_ZERO = -1e6  # exp of it is 0; replaces -inf, whose product with l = 0 is NaN


def checked_exponential_kernel(
  function: str, kernel: ExponentialKernel, width: int | None, *others
) -> ExponentialKernel:
  """Checks a kernel and casts its arrays to one precision, at least float32, that of `others` too.

  Real poles have real exponentials: then only the real part of a coefficient counts.

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


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def exponentials(log_pole: jax.Array, steps: Sequence[int]) -> jax.Array:
  """[len(steps), ...]: exp(l log_pole) for each l of the (hashable) `steps`, 0 <= l < 2^24."""
  real = log_pole.real
  steps_ = np.asarray(steps).reshape(-1, *(1,) * real.ndim).astype(real.dtype)
  steps_ = jnp.broadcast_to(steps_, (len(steps), *real.shape))
  high, low = two_product(jnp.maximum(real, _LOG_ZERO), steps_)
  modulus = jnp.exp(high) * (1 + low)
  if not jnp.issubdtype(log_pole.dtype, jnp.complexfloating):
    return modulus
  turns = _times_constant((log_pole.imag, None), _TURNS_PER_RADIAN)
  high, low = two_product(turns[0], steps_)
  fraction = two_sum(high - jnp.round(high), low + turns[1] * steps_)
  angle, rest = _times_constant(fraction, _TURN)
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  return jax.lax.complex(modulus * (cos - rest * sin), modulus * (sin + rest * cos))


@exponentials.defjvp
def _exponentials_jvp(steps, primals, tangents):
  values = exponentials(*primals, steps)
  factors = np.asarray(steps).reshape(-1, *(1,) * primals[0].ndim)
  return values, jnp.asarray(factors, primals[0].real.dtype) * values * tangents[0]


def _times_constant(number, constant):
  """The product of two sums of two floats, as such a sum."""
  dtype = number[0].dtype
  first = dtype.type(constant[0])
  second = dtype.type((constant[0] - float(first)) + constant[1])
  high, low = two_product(number[0], jnp.full_like(number[0], first))
  low = low + number[0] * second
  return two_sum(high, low if number[1] is None else low + number[1] * first)


def exponential_kernel_taps(kernel: ExponentialKernel, length: int) -> jax.Array:
  """The first `length` taps of a sum of exponentials, [length, D], real.

      taps_l = Re sum_n coefficient_n exp(l log_pole_n)          + direct at l = 0

  The exponentials are products of sqrt(length) + sqrt(length) factors: no array has size
  [length, D, N]. `length` is at most 2^24.

  Raises:
    ValueError: the arrays of `kernel` do not agree, or `length` is out of range.
  """
  if not 1 <= length <= 2**24:
    raise ValueError(
      f"exponential_kernel_taps: length={length} must be at least 1 and at most 2^24."
    )
  kernel = checked_exponential_kernel("exponential_kernel_taps", kernel, None)
  inner = math.isqrt(length - 1) + 1
  outer = -(-length // inner)
  rows = exponentials(kernel.log_pole, range(0, outer * inner, inner))
  read = rows * kernel.coefficient
  columns = exponentials(kernel.log_pole, range(inner))
  table = jnp.einsum("jdn,idn->jid", read_parts(read), parts(columns), precision="highest")
  table = table.reshape(-1, table.shape[-1])[:length]
  return table if kernel.direct is None else table.at[0].add(kernel.direct)


def parts(x: jax.Array) -> jax.Array:
  """Complex [..., N] as real [..., 2 N], for real matrix products; real arrays as they are."""
  if not jnp.issubdtype(x.dtype, jnp.complexfloating):
    return x
  return jnp.concatenate([x.real, x.imag], axis=-1)


def read_parts(x: jax.Array) -> jax.Array:
  """Weights w with sum(w * parts(h)) = Re sum_n x_n h_n."""
  if not jnp.issubdtype(x.dtype, jnp.complexfloating):
    return x
  return jnp.concatenate([x.real, -x.imag], axis=-1)


def whole(x: jax.Array, like: jax.Array) -> jax.Array:
  """Undoes `parts`, if `like` is complex."""
  if not jnp.issubdtype(like.dtype, jnp.complexfloating):
    return x
  return jax.lax.complex(*jnp.split(x, 2, axis=-1))
