"""Kernels that are sums of exponentials, and the states that a long convolution carries."""

from typing import NamedTuple

import jax


class ExponentialKernel(NamedTuple):
  """kernel_l = Re sum_n coefficient_n exp(l log_pole_n), with `direct` added at l = 0.

  `log_pole` and `coefficient` are real or complex; Re log_pole <= 0, -inf included (a pole of 0).
  """

  log_pole: jax.Array  # [D, N]
  coefficient: jax.Array  # [D, N]
  direct: jax.Array | None = None  # [D], real


class LongConvolutionState(NamedTuple):
  """What a sequence leaves behind for a kernel of L taps. float32 (float64 for float64 inputs)."""

  inputs: jax.Array  # [B, L - 1, D], the last inputs, the newest last; zeros where there were none


class ExponentialState(NamedTuple):
  """What a sequence leaves behind for a sum of exponentials.

  complex64, or float32 where the poles are real (or 64 bit).
  """

  h: jax.Array  # [B, D, N], h_t = exp(log_pole) h_{t-1} + x_t
