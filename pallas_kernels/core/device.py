"""Facts about the device that tile sizes and grids are chosen for: a Hopper GPU (H100, H200)."""

SM_COUNT = 132
SMEM_OF_TWO_CTAS = 113 * 1024  # bytes that each of two CTAs can have that share an SM
MAX_GRID_SIZE = 65535  # CTAs along the second and the third axis of a grid


def num_splits(ctas: int, length: int, min_length: int, ctas_per_sm: int = 1) -> int:
  """Number of splits of a sequence, a power of two, that gives every SM work.

  Args:
    ctas: CTAs per split.
    length: tokens of the sequence.
    min_length: tokens that a split has at least.
    ctas_per_sm: CTAs that an SM runs at the same time.
  """
  number = 1
  while 2 * number * ctas <= ctas_per_sm * SM_COUNT and length >= 2 * number * min_length:
    number *= 2
  return number
