"""Helpers of the tests of interpreted kernels."""

import pytest

# The interpreter multiplies with numpy. Inside a block of steps the kernels weight a pair in the
# wrong order of time too, before it is masked: its weight may overflow, and nothing reads it.
MASKED_LATER = [
  pytest.mark.filterwarnings(f"ignore:{what} encountered in matmul:RuntimeWarning")
  for what in ("overflow", "invalid value")
]
