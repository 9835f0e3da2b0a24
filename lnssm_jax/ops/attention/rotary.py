"""Rotary position embedding."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax.ops.core.checks import check_floating, check_shape, is_number
from lnssm_jax.ops.core.precision import accumulation_dtype

_NAME = "rotary_embedding"
# {rule: the numbers that it has}
SCALINGS = {
  "linear": ("factor",),
  "llama3": ("factor", "low_frequency_factor", "high_frequency_factor", "original_length"),
  "yarn": ("factor", "slow_turns", "fast_turns", "original_length", "magnitude", "whole_pairs"),
  "dynamic": ("factor", "original_length"),
}
_ASCENDING = (("low_frequency_factor", "high_frequency_factor"), ("slow_turns", "fast_turns"))


def rotary_embedding(
  x: jax.Array,  # [B, T, H, K]
  positions: jax.Array,  # [B, T] or [T]
  base: float = 10000.0,
  *,
  width: int | None = None,
  interleaved: bool = False,
  scaling: Mapping[str, Any] | None = None,
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
    scaling: slower rotations, for sequences longer than those of the first training: a "rule" and
      its numbers. {"rule": "linear", "factor": f} divides all frequencies by f. {"rule": "llama3",
      "factor": f, "low_frequency_factor": a, "high_frequency_factor": b, "original_length": L}
      divides those by f that turn less than a times in L tokens, none that turn more than b times,
      and in between interpolates: frequency (w + (1 - w) / f), w = (turns - a) / (b - a).
      {"rule": "yarn", "factor": f, "slow_turns": a, "fast_turns": b, "original_length": L,
      "magnitude": m, "whole_pairs": True} interpolates by the number i of the pair instead, with
      w = (i_a - i) / (i_a - i_b) for the i_n that turns n times in L tokens, of which "whole_pairs"
      takes the next whole numbers outside; and multiplies what rotates by m.
      {"rule": "dynamic", "factor": f, "original_length": L} changes nothing up to L tokens, which
      are all that it may be used for: beyond, all frequencies would depend on the length.

  Returns:
    An array like `x`; computed in float32 (float64 if `x` is).

  Raises:
    ValueError: shapes or dtypes do not agree, `width` is odd or exceeds K, or `scaling` has another
      rule or other numbers.

  Sources: RoFormer (Su et al. 2021), eq. 15; "linear", Chen et al. 2023, section 2.3; "llama3", the
  published code of Llama 3.1; "yarn", Peng et al. 2023, sections 3.2 to 3.4, and with whole pairs
  their code; "dynamic", transformers.
  """
  x, positions = jnp.asarray(x), jnp.asarray(positions)
  check_floating(_NAME, "x", x)
  check_shape(_NAME, "x", x, (None,) * 4, "[B, T, H, K]")
  B, T, _, K = x.shape
  if positions.ndim == 1:
    check_shape(_NAME, "positions", positions, (T,), "[T]")
  else:
    check_shape(_NAME, "positions", positions, (B, T), "[B, T]")
  if not is_number(base) or base <= 0:
    raise ValueError(f"{_NAME}: base={base!r} must be a positive Python number, such as 10000.")
  width = K if width is None else width
  if width % 2 or not 0 < width <= K:
    raise ValueError(f"{_NAME}: width={width} must be even and between 2 and K={K}.")

  acc = accumulation_dtype(x)
  frequency, magnitude = float(base) ** (-np.arange(0, width, 2) / width), 1.0
  if scaling is not None:
    scaling = check_scaling(scaling)
    frequency, magnitude = _scaled(frequency, float(base), scaling), scaling.get("magnitude", 1.0)
  angle = _angles(positions, frequency, acc)[..., None, :]  # [B or nothing, T, 1, width/2]
  cos, sin = magnitude * jnp.cos(angle), magnitude * jnp.sin(angle)
  # x cos + (the pair's other channel) sin, with the other channel by a reversal: the gradient has
  # the same form, one pass over memory, where halves would be padded and added.
  pair = -1 if interleaved else -2
  shape = [width // 2, width // 2]
  shape[pair] = 2
  paired = x[..., :width].astype(acc).reshape(*x.shape[:-1], *shape)
  cos, sin = jnp.expand_dims(cos, pair), jnp.stack([-sin, sin], axis=pair)
  rotated = (paired * cos + jnp.flip(paired, pair) * sin).reshape(*x.shape[:-1], width)
  return jnp.concatenate([rotated.astype(x.dtype), x[..., width:]], axis=-1)


def check_scaling(scaling: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a `scaling` of `rotary_embedding`; ValueError unless it has a rule and its numbers."""
  given = dict(scaling)
  names = SCALINGS.get(str(given.get("rule")))
  if names is None:
    raise ValueError(f"scaling={given!r} needs a 'rule', one of {', '.join(map(repr, SCALINGS))}.")
  if given.keys() != {"rule", *names}:
    raise ValueError(f"scaling={given!r} must have exactly 'rule', {', '.join(map(repr, names))}.")
  for name in names:
    value = given[name]
    if name == "whole_pairs":
      if not isinstance(value, bool):
        raise ValueError(f"scaling: {name}={value!r} must be True or False.")
    elif not is_number(value) or not 0 < value < math.inf:
      raise ValueError(f"scaling: {name}={value!r} must be a positive number.")
  for low, high in _ASCENDING:
    if low in names and not given[low] < given[high]:
      raise ValueError(f"scaling: {low}={given[low]} must be less than {high}={given[high]}.")
  return given


def _scaled(frequency, base, scaling):
  if scaling["rule"] == "dynamic":
    return frequency
  if scaling["rule"] == "linear":
    return frequency / scaling["factor"]
  if scaling["rule"] == "llama3":
    low, high = scaling["low_frequency_factor"], scaling["high_frequency_factor"]
    turns = scaling["original_length"] * frequency / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
  else:
    kept = _kept_by_yarn(2 * len(frequency), base, scaling)
  return frequency * (kept + (1 - kept) / scaling["factor"])


def _kept_by_yarn(width, base, scaling):
  """The share of each pair's frequency that is not divided, [width / 2]."""
  if base <= 1:
    raise ValueError(f"{_NAME}: base={base} must be above 1 for the scaling 'yarn'.")
  wavelength = lambda turns: scaling["original_length"] / (2 * math.pi * turns)
  pair = lambda turns: width * math.log(wavelength(turns)) / (2 * math.log(base))
  first, last = pair(scaling["fast_turns"]), pair(scaling["slow_turns"])
  if scaling["whole_pairs"]:
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, width - 1)
  if first == last:
    last += 1e-3
  return np.clip((last - np.arange(width // 2)) / (last - first), 0, 1)


def _angles(positions, frequency, dtype):
  """[..., T, width / 2] in radians, up to whole turns."""
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
