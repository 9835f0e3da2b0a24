"""exp(l p) for whole l, to the last digits, and the taps of a sum of exponentials.

The rounding of l p, of up to l |Im p| / 2 units, would be an error of the phase; and the rounding
of exp(p) grows with l when it is multiplied. So l p is carried as an unevaluated sum of two floats
(Dekker 1971), the phase in turns, of which the whole ones are taken off exactly.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax.ops.diagonal_scan.powers import exact_product, exact_sum
from lnssm_jax.ops.long_convolution.checked import checked_exponential_kernel
from lnssm_jax.ops.long_convolution.state import ExponentialKernel

_TURN = (6.283185307179586, 2.4492935982947064e-16)  # 2 pi
_TURNS_PER_RADIAN = (0.15915494309189535, -9.839338337591243e-18)  # 1 / (2 pi)
_FORGOTTEN = -1e6  # exp of it is 0; stands for -inf, which has no product with l = 0


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def exponentials(log_pole: jax.Array, steps: Sequence[int]) -> jax.Array:
  """[len(steps), ...]: exp(l log_pole) for each l of the (hashable) `steps`, 0 <= l < 2^24."""
  real = log_pole.real
  steps_ = np.asarray(steps).reshape(-1, *(1,) * real.ndim).astype(real.dtype)
  steps_ = jnp.broadcast_to(steps_, (len(steps), *real.shape))
  high, low = exact_product(jnp.maximum(real, _FORGOTTEN), steps_)
  modulus = jnp.exp(high) * (1 + low)
  if not jnp.issubdtype(log_pole.dtype, jnp.complexfloating):
    return modulus
  turns = _times_constant((log_pole.imag, None), _TURNS_PER_RADIAN)
  high, low = exact_product(turns[0], steps_)
  fraction = exact_sum(high - jnp.round(high), low + turns[1] * steps_)
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
  high, low = exact_product(number[0], jnp.full_like(number[0], first))
  low = low + number[0] * second
  return exact_sum(high, low if number[1] is None else low + number[1] * first)


def exponential_kernel_taps(kernel: ExponentialKernel, length: int) -> jax.Array:
  """The first `length` taps of a sum of exponentials, [length, D], real.

      taps_l = Re sum_n coefficient_n exp(l log_pole_n)          + direct at l = 0

  The exponentials are made as products of sqrt(length) + sqrt(length) ones: nothing of size
  [length, D, N] exists. `length` is at most 2^24.

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
  """What `parts(h)` is multiplied by and summed to give Re sum_n x_n h_n."""
  if not jnp.issubdtype(x.dtype, jnp.complexfloating):
    return x
  return jnp.concatenate([x.real, -x.imag], axis=-1)


def whole(x: jax.Array, like: jax.Array) -> jax.Array:
  """Undoes `parts`, if `like` is complex."""
  if not jnp.issubdtype(like.dtype, jnp.complexfloating):
    return x
  return jax.lax.complex(*jnp.split(x, 2, axis=-1))
