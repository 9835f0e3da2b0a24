"""Linear time-invariant state spaces with a diagonal matrix: S4D, DSS, and with many inputs S5."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lnssm_jax.mixers.base import Mixer
from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.activations import GELUS
from lnssm_jax.mixers.common.checks import check_choice, check_positive
from lnssm_jax.mixers.common.complex_state import (
  ComplexState,
  empty_state,
  from_complex,
  to_complex,
)
from lnssm_jax.mixers.common.hippo import hippo_normal, positive_frequencies
from lnssm_jax.mixers.common.initializers import uniform_fan_in
from lnssm_jax.mixers.common.projections import Linear
from lnssm_jax.mixers.common.single_input import SingleInput, conjugate_pairs, log_steps, normal
from lnssm_jax.ops import (
  DiagonalState,
  ExponentialKernel,
  ExponentialState,
  diagonal_scan,
  long_convolution,
)
from lnssm_jax.ops.core.precision import wide

_EPSILON = 1e-7  # of DSS_softmax's reciprocal


class _Diagonal(SingleInput):
  """The convolution with a sum of exponentials."""

  recurrence_flops = functools.partialmethod(flops.complex_states, per_entry=11, skip=True)
  sharding = ((r"a_imag|c_real|c_imag", ("fsdp", None)),)  # [D, N]

  def _filter(self, x, h, segment_ids):
    y, (h,) = long_convolution(
      x,
      self._kernel(),
      **self._place(None if h is None else ExponentialState(h), segment_ids),
    )
    return y, h

  def _kernel(self) -> ExponentialKernel:
    raise NotImplementedError

  def _stepped(self, pole: jax.Array) -> jax.Array:
    """dt A, [D, N] complex."""
    step = jnp.exp(wide(self.log_dt[...]))
    if step.ndim == 1:
      return step[:, None] * pole
    return jax.lax.complex(step[:, :1] * pole.real, step[:, 1:] * pole.imag)

  def _held(self, pole: jax.Array, weight: jax.Array) -> ExponentialKernel:
    """The kernel Re sum_n weight_n (exp(dt pole_n) - 1) / pole_n exp(l dt pole_n), and the skip."""
    log_pole = self._stepped(pole)
    # expm1: the difference itself would cancel where dt is small.
    return ExponentialKernel(log_pole, weight * jnp.expm1(log_pole) / pole, wide(self.skip[...]))


class S4D(_Diagonal):
  r"""A diagonal state space per channel, in N / 2 pairs of complex numbers and their conjugates.

      h_t = exp(dt A) h_{t-1} + (exp(dt A) - 1) / A u_t            A, c: [D, N / 2] complex; dt [D]
      y_t = 2 Re sum_n c_n h_t,n + skip u_t                        for each channel
      [a_t, g_t] = W_o gelu(y_t) + b_o,      out_t = a_t sigmoid(g_t)

  A = -exp(a_log) + i a_imag starts at -1/2 + i pi n (S4D-Lin); dt is log-uniform between 0.001 and
  0.1, c complex normal, skip normal. As a convolution its kernel is a sum of exponentials, computed
  in chunks; decoding uses the recurrence.

  Args:
    dim: D, the width.
    state_dim: N, even.
    dtype: of u and of the last layer; A, dt, state and sums are float32.
    param_dtype: of the parameters.

  The state is h divided by the constant (exp(dt A) - 1) / A.

  Raises:
    ValueError: a size is not positive, or `state_dim` is odd.

  Source: S4D (Gu et al. 2022), sections 3 and 4 and its published code, with that code's last
  layer, which starts uniform within 1 / sqrt(D). gelu is exact.
  """

  name = "s4d"

  def __init__(
    self,
    dim: int,
    *,
    state_dim: int = 64,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    check_positive("dim", dim)
    pairs = conjugate_pairs(state_dim)
    super().__init__(dim, pairs, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
    self.a_log = nnx.Param(jnp.full((dim, pairs), math.log(0.5), param_dtype))
    imag = jnp.broadcast_to(math.pi * jnp.arange(pairs), (dim, pairs))
    self.a_imag = nnx.Param(imag.astype(param_dtype))
    self.c_real = normal((dim, pairs), 0.5**0.5, param_dtype, rngs)
    self.c_imag = normal((dim, pairs), 0.5**0.5, param_dtype, rngs)

  def _kernel(self) -> ExponentialKernel:
    pole = jax.lax.complex(-jnp.exp(wide(self.a_log[...])), wide(self.a_imag[...]))
    weight = 2 * jax.lax.complex(wide(self.c_real[...]), wide(self.c_imag[...]))
    return self._held(pole, weight)


class DSS(_Diagonal):
  r"""A diagonal state space per channel, whose N complex poles all channels share.

      h_t = exp(dt A) h_{t-1} + (exp(dt A) - 1) / A u_t          A: [N], c: [D, N], complex; dt [D]
      y_t = Re sum_n c_n h_t,n + skip u_t                          for each channel
      [a_t, g_t] = W_o gelu(y_t) + b_o,      out_t = a_t sigmoid(g_t)

  A = -exp(pole_log) + i pole_imag starts at the eigenvalues of positive imaginary part of the
  normal part of HiPPO-LegS of size 2 N; dt is log-uniform between 0.001 and 0.1, the real and
  imaginary parts of c and skip are standard normal.

  With `kernel_length` L it is DSS_softmax: the powers exp(l dt A), 0 <= l < L, which are the kernel
  of each pole, are divided by their sum, and by A. That replaces the second formula by

      y_t = Re sum_n c_n h_t,n / (exp(L dt A_n) - 1) + skip u_t

  where, as published, 1 / (exp(L dt A) - 1) is A z^* / (|z|^2 + 1e-7) with z = A (exp(L dt A) - 1).
  Sequences may be longer than L; their kernel continues as the powers do.

  Args:
    dim: D, the width.
    state_dim: N, complex numbers per channel.
    kernel_length: L, or None for DSS_exp.
    separate_steps: two steps per channel, log_dt [D, 2]: exp of the first multiplies the real part
      of A, exp of the second its imaginary part ("sep_dt_re_im", True in the published code). They
      start equal.
    dtype: of u and of the last layer; A, dt, state and sums are float32.
    param_dtype: of the parameters.

  The state is sum_s exp((t - s) dt A) u_s: h divided by a constant.

  Raises:
    ValueError: a size is not positive.

  Source: DSS (Gupta et al. 2022), proposition 1, section 3 and appendix A.2, with the last layer of
  `S4D`. In DSS_softmax the paper leaves the sign of A's real part free, and divides by the sum over
  the current sequence; here that part is negative, so that a state can be carried, and L is given.
  gelu is exact.
  """

  name = "dss"

  def __init__(
    self,
    dim: int,
    *,
    state_dim: int = 64,
    kernel_length: int | None = None,
    separate_steps: bool = False,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    check_positive("dim", dim)
    N = check_positive("state_dim", state_dim)
    if kernel_length is not None:
      check_positive("kernel_length", kernel_length)
    self.kernel_length = kernel_length
    super().__init__(
      dim, N, separate_steps=separate_steps, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )
    poles = positive_frequencies(N)
    self.pole_log = nnx.Param(jnp.asarray(np.log(-poles.real), param_dtype))
    self.pole_imag = nnx.Param(jnp.asarray(poles.imag, param_dtype))
    self.c_real = normal((dim, N), 1.0, param_dtype, rngs)
    self.c_imag = normal((dim, N), 1.0, param_dtype, rngs)

  def _kernel(self) -> ExponentialKernel:
    pole = jax.lax.complex(-jnp.exp(wide(self.pole_log[...])), wide(self.pole_imag[...]))
    weight = jax.lax.complex(wide(self.c_real[...]), wide(self.c_imag[...]))
    if self.kernel_length is not None:
      z = pole * jnp.expm1(self.kernel_length * self._stepped(pole))
      weight = weight * pole * z.conj() / (z.real**2 + z.imag**2 + _EPSILON)
    return self._held(pole, weight)


class S5(Mixer[ComplexState]):
  r"""One diagonal state space for all channels, in N / 2 pairs of complex numbers.

      h_t = exp(dt A) h_{t-1} + (exp(dt A) - 1) / A (W_b u_t)            A, dt: [N / 2], A complex
      y_t = 2 Re(W_c h_t) + skip u_t,      z_t = gelu(y_t)
      out_t = z_t sigmoid(W_g z_t + b_g)

  W_b and W_c are complex; their kernels hold real parts, then imaginary parts (of W_c with the sign
  of the sum that they enter). A = -exp(pole_log) + i pole_imag starts at the eigenvalues of the
  normal part V diag(A) V^* of HiPPO-LegS, of size N / num_blocks, once for each block; W_b at V^*
  times a normal matrix of variance 1 / N, W_c at a complex matrix with parts of variance 1 / N
  times V, each block by itself. dt is log-uniform between 0.001 and 0.1, skip normal.

  Args:
    dim: D, the width.
    state_dim: N, a multiple of 2 `num_blocks`.
    num_blocks: how many copies of the HiPPO matrix the state starts from.
    gelu: "exact" or "tanh", its approximation, which the published code has.
    dtype: of the projections; A, dt, state and sums are float32.
    param_dtype: of the parameters.

  The state is h [B, N / 2].

  Raises:
    ValueError: a size is not positive, `state_dim` is not a multiple of 2 `num_blocks`, or `gelu`
      is unknown.

  Source: S5 (Smith et al. 2023), sections 3 and 4 and appendix B, with the output of its published
  code. There the real part of A is a parameter itself, and might become positive. W_g and b_g
  start uniform within 1 / sqrt(D).
  """

  name = "s5"
  recurrence_flops = functools.partialmethod(flops.complex_states, per_entry=8)

  def __init__(
    self,
    dim: int,
    *,
    state_dim: int = 64,
    num_blocks: int = 1,
    gelu: str = "exact",
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.dtype = check_positive("dim", dim), jnp.dtype(dtype)
    self.pairs = conjugate_pairs(state_dim)
    self.gelu = check_choice("gelu", gelu, GELUS)
    blocks = check_positive("num_blocks", num_blocks)
    if state_dim % (2 * blocks):
      raise ValueError(
        f"state_dim={state_dim} is not a multiple of 2 * num_blocks = {2 * blocks}; change either."
      )
    size = state_dim // blocks
    poles, v, _ = hippo_normal(size)
    poles, v = np.tile(poles[size // 2 :], blocks), v[:, size // 2 :]  # one of each pair
    self.pole_log = nnx.Param(jnp.asarray(np.log(-poles.real), param_dtype))
    self.pole_imag = nnx.Param(jnp.asarray(poles.imag, param_dtype))
    self.log_dt = log_steps(self.pairs, param_dtype, rngs)
    self.skip = normal((dim,), 1.0, param_dtype, rngs)
    draw = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")

    def to_eigenvectors(m, v):  # [..., blocks * size] -> [..., N / 2], a block at a time
      m = m.reshape(*m.shape[:-1], blocks, size) @ jnp.asarray(v, jnp.complex64)
      return m.reshape(*m.shape[:-2], -1)

    def b_init(key, shape, dtype):
      b = to_eigenvectors(draw(key, (state_dim, dim), jnp.float32).T, v.conj())
      return jnp.concatenate([b.real, b.imag], axis=-1).astype(dtype)

    def c_init(key, shape, dtype):
      parts = draw(key, (state_dim, 2 * dim), jnp.float32).T
      c = to_eigenvectors(jax.lax.complex(parts[:dim], parts[dim:]), v).T
      return jnp.concatenate([c.real, -c.imag], axis=0).astype(dtype)

    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self.b_proj = Linear(dim, state_dim, kernel_init=b_init, **options)
    self.c_proj = Linear(state_dim, dim, kernel_init=c_init, **options)
    init = uniform_fan_in(dim)
    self.g_proj = Linear(dim, dim, kernel_init=init, bias_init=init, **options)

  def _init_state(self, B):
    return empty_state(B, self.pairs)

  def _mix(self, x, state, segment_ids):
    pole = jax.lax.complex(-jnp.exp(wide(self.pole_log[...])), wide(self.pole_imag[...]))
    log_pole = jnp.exp(wide(self.log_dt[...])) * pole
    added = jax.lax.complex(*jnp.split(wide(self.b_proj(x)), 2, axis=-1))
    h, recurrent = diagonal_scan(
      jnp.exp(log_pole),
      jnp.expm1(log_pole) / pole * added,  # expm1: the difference itself would cancel
      **self._place(None if state is None else DiagonalState(to_complex(state)), segment_ids),
    )
    parts = jnp.concatenate([h.real, h.imag], axis=-1).astype(self.dtype)
    y = 2 * wide(self.c_proj(parts)) + wide(self.skip[...]) * wide(x)
    z = GELUS[self.gelu](y)
    gate = self.g_proj(z.astype(self.dtype))
    return (z * jax.nn.sigmoid(gate)).astype(self.dtype), from_complex(recurrent.h)
