"""S4: a state space per channel whose matrix is diagonal plus one of rank 1."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.checks import check_positive
from lnssm_jax.mixers.common.hippo import hippo_normal
from lnssm_jax.mixers.common.single_input import SingleInput, conjugate_pairs, normal
from lnssm_jax.ops import long_convolution
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.segments import segments_of

_product = functools.partial(jnp.einsum, precision="highest")


class S4(SingleInput):
  r"""HiPPO's state space per channel, in N / 2 pairs of complex numbers and their conjugates.

      A h = Lambda h - 2 P Re(P^* h)                 Lambda, P, B: [N / 2] complex; c: [D, N / 2]
      h_t = (1 - dt A / 2)^(-1) ((1 + dt A / 2) h_{t-1} + dt B u_t)                    dt: [D]
      y_t = 2 Re sum_n c_n h_t,n + skip u_t          for each channel
      [a_t, g_t] = W_o gelu(y_t) + b_o,      out_t = a_t sigmoid(g_t)

  A starts as HiPPO-LegS: Lambda = -exp(pole_log) + i pole_imag at the eigenvalues of its normal
  part V diag(Lambda) V^*, P and B at V^* times sqrt(n + 1/2) and sqrt(2 n + 1). All channels share
  them; each has a step size dt, initially log-uniform between 0.001 and 0.1; c is complex normal,
  skip normal.

  The taps c A'^l B' of T tokens are computed from powers of A', whose norm is at most 1, by
  repeated squaring and in about sqrt(T) products of them; the rest is a long convolution. (The
  paper's generating function gives the taps without squaring, but needs an FFT of length T.) The
  contribution of the initial state and the state after the last token come from the same powers. A
  call with T = 1 is the recurrence, in time O(N) per channel.

  Args:
    dim: D, the width.
    state_dim: N, even.
    dtype: of u and of the last layer; A, dt, state and sums are float32.
    param_dtype: of the parameters.

  The state is h.

  Raises:
    ValueError: a size is not positive, or `state_dim` is odd.

  Source: S4 (Gu et al. 2022), sections 3 and 4 and appendix C, and its published code: one matrix
  for all channels, the last layer, which starts uniform within 1 / sqrt(D). gelu is exact.
  """

  name = "s4"
  can_shard_time = False
  no_recurrence = (
    "has the taps of a recurrence whose matrix is not diagonal; those of S4D and DSS are"
  )
  recurrence_flops = functools.partialmethod(flops.complex_states, per_entry=26, skip=True)
  sharding = ((r"c_real|c_imag", ("fsdp", None)),)  # [D, N]

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
    poles, v, p = hippo_normal(state_dim)
    poles, v = poles[pairs:], v[:, pairs:]  # one of each pair
    of_normal = {"p": v.conj().T @ p, "b": v.conj().T @ (math.sqrt(2) * p)}
    param = lambda x: nnx.Param(jnp.asarray(x, param_dtype))
    self.pole_log, self.pole_imag = param(np.log(-poles.real)), param(poles.imag)
    self.p_real, self.p_imag = param(of_normal["p"].real), param(of_normal["p"].imag)
    self.b_real, self.b_imag = param(of_normal["b"].real), param(of_normal["b"].imag)
    self.c_real = normal((dim, pairs), 0.5**0.5, param_dtype, rngs)
    self.c_imag = normal((dim, pairs), 0.5**0.5, param_dtype, rngs)

  def _solve(self, v: jax.Array) -> jax.Array:
    """(1 - dt A / 2)^(-1) v for v [..., D, N / 2], by the formula of Sherman and Morrison."""
    dt = jnp.exp(wide(self.log_dt[...]))[:, None]
    pole = jax.lax.complex(-jnp.exp(wide(self.pole_log[...])), wide(self.pole_imag[...]))
    p = jax.lax.complex(wide(self.p_real[...]), wide(self.p_imag[...]))
    resolvent = 1 / (1 - dt / 2 * pole)
    along = lambda v: jnp.sum((p.conj() * v).real, axis=-1, keepdims=True)
    share = dt * along(resolvent * v) / (1 + dt * along(resolvent * p))
    return resolvent * (v - p * share)

  def _filter(self, x, h, segment_ids):
    B, T, _ = x.shape
    b = jax.lax.complex(wide(self.b_real[...]), wide(self.b_imag[...]))
    added = self._solve(jnp.exp(wide(self.log_dt[...]))[:, None] * b)  # B' [D, N / 2]
    c = 2 * jnp.concatenate([wide(self.c_real[...]), -wide(self.c_imag[...])], axis=-1)
    if T == 1 and h is not None:
      h = 2 * self._solve(h) - h + added * wide(x)[:, 0, :, None]
      y = jnp.sum(c * _parts(h), axis=-1) + wide(self.skip[...]) * wide(x)[:, 0]
      return y[:, None], h
    segments = segments_of("S4", segment_ids, B, T)
    run = jax.checkpoint(_convolution)  # recompute the powers in the backward pass
    y, h = run(wide(x), h, segments, self._matrix(), _parts(added), c, wide(self.skip[...]))
    return y, jax.lax.complex(*jnp.split(h, 2, axis=-1))

  def _log_decays(self, x, state, segment_ids):
    moduli = jnp.abs(jnp.linalg.eigvals(self._matrix()))  # [D, N]
    return [jnp.log(jnp.sort(moduli, axis=-1))]

  def _matrix(self) -> jax.Array:
    """A' = 2 (1 - dt A / 2)^(-1) - 1 as a real matrix [D, N, N] of real and imaginary parts."""
    pairs = self.state_size
    basis = np.concatenate([np.eye(pairs), 1j * np.eye(pairs)])[:, None]
    basis = jnp.broadcast_to(jnp.asarray(basis, jnp.complex64), (2 * pairs, self.dim, pairs))
    return jnp.moveaxis(_parts(2 * self._solve(basis) - basis), 0, -1)


def _parts(h: jax.Array) -> jax.Array:
  """Complex [..., N / 2] as real [..., N]."""
  return jnp.concatenate([h.real, h.imag], axis=-1)


def _convolution(x, h, segments, matrix, b, c, skip):
  """y_t = c h_t + skip x_t with h_t = A h_{t-1} + b x_t for x [B, T, D], and the last h [B, D, N].

  matrix A [D, N, N]; b, c [D, N]; h [B, D, N / 2] complex, or None.
  """
  B, T, D = x.shape
  bits = T.bit_length()
  inner = (bits + 1) // 2
  powers = [matrix]  # of the exponents 1, 2, 4, ...
  for _ in range(bits - 1):
    powers.append(_product("dij,djk->dik", powers[-1], powers[-1]))

  columns = _orbit(b, powers[:inner])  # A^i b, [I, D, N]
  rows = _orbit(c, [jnp.swapaxes(p, -1, -2) for p in powers[inner:]])  # c A^(I j), [J, D, N]
  taps = _product("jdn,idn->jid", rows, columns).reshape(-1, D)[:T]
  # "chunked": no output depends on a later token, not even in its last digit.
  y, _ = long_convolution(
    x,
    taps.at[0].add(skip),
    segment_ids=None if segments is None else segments.ids,
    implementation="chunked",
  )

  of_last = x if segments is None else jnp.where(segments.in_last()[..., None], x, 0)
  size = len(columns) * len(rows)
  by_lag = jnp.pad(jnp.flip(of_last, 1), ((0, 0), (0, size - T), (0, 0)))
  left = _product("bjid,idn->jbdn", by_lag.reshape(B, len(rows), len(columns), D), columns)
  for power in powers[inner:]:
    left = left[0::2] + _product("dnm,jbdm->jbdn", power, left[1::2])
  last = left[0]

  if h is not None:
    before = _parts(h)
    seen = _orbit(_product("dnm,bdm->bdn", matrix, before), powers[:inner])
    carried = _product("jdn,ibdn->bjid", rows, seen).reshape(B, -1, D)[:, :T]
    kept = before
    for i in range(bits):
      if T >> i & 1:
        kept = _product("dnm,bdm->bdn", powers[i], kept)
    if segments is not None:
      carried = jnp.where((segments.index == 0)[..., None], carried, 0)
      kept = jnp.where(segments.several()[..., None], 0, kept)
    y, last = y + carried, last + kept
  return y, last


def _orbit(v: jax.Array, powers: list[jax.Array]) -> jax.Array:
  """M^j v, j = 0 ... 2^len(powers) - 1, for v [..., D, N] and the powers M, M^2, M^4, ..."""
  orbit = v[None]
  for power in powers:
    orbit = jnp.concatenate([orbit, _product("dnm,...dm->...dn", power, orbit)])
  return orbit
