"""Rotary position embedding."""

import math
import numbers

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax.ops.core.checks import check_floating, check_shape
from lnssm_jax.ops.core.precision import accumulation_dtype

_NAME = "rotary_embedding"


def rotary_embedding(
  x: jax.Array,  # [B, T, H, K]
  positions: jax.Array,  # [B, T] or [T]
  base: float = 10000.0,
  *,
  width: int | None = None,
  interleaved: bool = False,
) -> jax.Array:
  """Rotates pairs of channels by angles proportional to the position.

      (x_1, x_2) -> (x_1 cos a - x_2 sin a, x_1 sin a + x_2 cos a)
      a = position * base^(-2i/width)   for pair i = 0, 1, ...

  A product of a rotated query and a rotated key then depends on the difference of their positions.
  The angles of integer positions are accurate to the rounding of a float32 at any position: whole
  turns are removed in integer arithmetic. (The float32 product of position and frequency is
  off by 0.001 at position 131,072.)

  Args:
    positions: integers, or floats (for interpolated positions), used as they are.
    base: the wavelengths grow from 2 pi to 2 pi base; a Python number.
    width: how many of the first channels rotate, an even number; None means all K.
    interleaved: pairs are channels (2i, 2i + 1) instead of (i, i + width / 2).

  Returns:
    An array like `x`; computed in float32 (float64 if `x` is).

  Raises:
    ValueError: shapes or dtypes do not agree, or `width` is odd or exceeds K.

  Source: RoFormer (Su et al. 2021), eq. 15.
  """
  x, positions = jnp.asarray(x), jnp.asarray(positions)
  check_floating(_NAME, "x", x)
  check_shape(_NAME, "x", x, (None,) * 4, "[B, T, H, K]")
  B, T, _, K = x.shape
  if positions.ndim == 1:
    check_shape(_NAME, "positions", positions, (T,), "[T]")
  else:
    check_shape(_NAME, "positions", positions, (B, T), "[B, T]")
  if isinstance(base, bool) or not isinstance(base, numbers.Real) or base <= 0:
    raise ValueError(f"{_NAME}: base={base!r} must be a positive Python number, such as 10000.")
  width = K if width is None else width
  if width % 2 or not 0 < width <= K:
    raise ValueError(f"{_NAME}: width={width} must be even and between 2 and K={K}.")

  acc = accumulation_dtype(x)
  angle = _angles(positions, float(base), width, acc)[..., None, :]  # [B or nothing, T, 1, width/2]
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  rotating = x[..., :width].astype(acc)
  if interleaved:
    first, second = rotating[..., 0::2], rotating[..., 1::2]
  else:
    first, second = rotating[..., : width // 2], rotating[..., width // 2 :]
  pair = (first * cos - second * sin, first * sin + second * cos)
  if interleaved:
    rotated = jnp.stack(pair, axis=-1).reshape(rotating.shape)
  else:
    rotated = jnp.concatenate(pair, axis=-1)
  return jnp.concatenate([rotated.astype(x.dtype), x[..., width:]], axis=-1)


def _angles(positions, base, width, dtype):
  """[..., T, width / 2] in radians, up to whole turns."""
  frequency = base ** (-np.arange(0, width, 2) / width)
  if dtype == jnp.float64 or not jnp.issubdtype(positions.dtype, jnp.integer):
    return positions.astype(dtype)[..., None] * jnp.asarray(frequency, dtype)
  # A turn is 2^32 units. The whole units per position are multiplied by the position modulo
  # 2^32, which is exact; the rest of a unit, times the position, is at most 2^31 units and known to
  # 24 bits.
  units = frequency / (2 * math.pi) * 2.0**32
  whole = np.floor(units)
  rest = jnp.asarray(units - whole, jnp.float32)
  position = positions[..., None]
  turned = position.astype(jnp.uint32) * jnp.asarray(whole % 2.0**32, jnp.uint32)
  turned += jnp.round(position.astype(jnp.float32) * rest).astype(jnp.int32).astype(jnp.uint32)
  signed = jax.lax.bitcast_convert_type(turned, jnp.int32)
  return signed.astype(jnp.float32) * np.float32(2 * math.pi / 2.0**32)
