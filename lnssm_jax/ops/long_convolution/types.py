"""Types of `long_convolution`: kernels that are sums of exponentials, states, checked arguments."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax import typing as ty
from lnssm_jax.ops.causal_conv1d.types import ConvState
from lnssm_jax.ops.core.segments import Segments
from lnssm_jax.ops.core.states import register_state


class ExponentialKernel(NamedTuple):
  """kernel_l = Re sum_n coefficient_n exp(l log_pole_n), with `direct` added at l = 0.

  `log_pole` and `coefficient` are real or complex; Re log_pole <= 0, -inf included (a pole of 0).
  """

  log_pole: jax.Array  # [D, N]
  coefficient: jax.Array  # [D, N]
  direct: jax.Array | None = None  # [D], real


@register_state
class ExponentialState(NamedTuple):
  """Recurrent state after the last token, complex64; float32 for real poles (or 64 bit)."""

  h: ty.AnyBDN  # h_t = exp(log_pole) h_{t-1} + x_t


class Inputs(NamedTuple):
  """The arguments in the form that every implementation takes."""

  x: jax.Array  # [B, T, D]
  kernel: Any  # an array [L, D], or an ExponentialKernel
  state: Any  # a ConvState or an ExponentialState, as the kernel; None: zeros
  segments: Segments | None


class Options(NamedTuple):
  """Static arguments."""

  acc: jnp.dtype  # the real dtype of the sums
  chunk_size: int | None = None


def init_state(
  *, batch: int, dim: int, taps: int | None = None, state_dim: int | None = None, dtype=None
) -> ConvState | ExponentialState:
  """The empty state for `dim` channels: of a kernel of L = `taps`, or of N = `state_dim` poles.

  `dtype` None means float32 for taps, complex64 for poles; give float32 for real poles.

  Raises:
    ValueError: both or none of `taps` and `state_dim` are given.
  """
  if (taps is None) == (state_dim is None):
    raise ValueError(
      f"long_convolution.init_state: taps={taps} and state_dim={state_dim}; give one of the two."
    )
  if taps is not None:
    return ConvState(jnp.zeros((batch, taps - 1, dim), dtype or jnp.float32))
  return ExponentialState(jnp.zeros((batch, dim, state_dim), dtype or jnp.complex64))
