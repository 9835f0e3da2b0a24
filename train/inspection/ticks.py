"""Round numbers for the axes of plots, and the scale of an axis."""

import math
from collections.abc import Callable, Sequence

_MOST = 7  # of an axis


def scale_of(values: Sequence[float], log: bool) -> Callable[[float], float]:
  """log10, or as it is without `log` or where a value is not above 0: no point is cut off."""
  return math.log10 if log and min(values) > 0 else float


def round_numbers(low: float, high: float, *, log: bool = False) -> list[float]:
  """Numbers of an axis from `low` to `high`: steps of 1, 2 or 5 times a power of ten.

  With `log`, over more than a decade, 1, 2 and 5 times powers of ten, or some of these powers. Of
  an axis without a range its one number.
  """
  if not low < high:
    return [low]
  if log and low > 0 and high >= 10 * low:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    stride = -(-len(powers) // _MOST)
    for choice in ([1, 2, 5], [1]):
      found = [n * 10.0**k for k in powers[::stride] for n in choice]
      inside = [x for x in found if low <= x <= high]
      if len(inside) <= _MOST or choice == [1]:
        return inside
  base = 10.0 ** math.floor(math.log10((high - low) / 5))
  step = next(n * base for n in (1, 2, 5, 10) if n * base >= (high - low) / 5 * (1 - 1e-9))
  first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
  digits = max(0, -math.floor(math.log10(step)))
  return [round(n * step, digits) for n in range(first, last + 1)]
