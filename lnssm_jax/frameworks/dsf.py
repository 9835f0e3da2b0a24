r"""The dynamical-systems framework: layers as linear systems with data-dependent matrices.

    h_i = Lambda_i h_{i-1} + B_i u_i,      y_i = C_i h_i + D_i u_i,      h before the first token: 0

Lambda_i is diagonal, N x N; B_i is N x d, C_i d x N, D_i d x d. Unrolled, y = Phi u with (eq. 12)

    Phi_ij = C_i Lambda_i ... Lambda_{j+1} B_j  for j < i,      Phi_ii = C_i B_i + D_i,      0 above

`system_of` writes a layer of ours and its input as such matrices; `apply` runs them and `kernel`
makes Phi. All are for equations and tests, one sequence at a time: a system has T N d numbers.

Source: Understanding the Differences in Foundation Models (Sieber et al. 2024), sections 2 and 3.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.mixers import S6, SSD, LinearAttention, NormalizedAttention
from lnssm_jax.mixers.kernel_attention import _LOWEST_KEY, _elu_plus_one
from lnssm_jax.ops.core.checks import check_shape
from lnssm_jax.ops.core.precision import wide

_NAME = "dsf"


class System(NamedTuple):
  """The matrices of T tokens."""

  transition: jax.Array  # [T, N], the diagonal of Lambda
  write: jax.Array  # [T, N, d], B
  read: jax.Array  # [T, d, N], C
  direct: jax.Array  # [T, d, d], D


def apply(system: System, u: jax.Array) -> jax.Array:
  """y [T, d] by the recurrence, for u [T, d].

  Raises:
    ValueError: shapes do not agree.
  """
  T, _, d = _checked(system).write.shape
  check_shape(_NAME, "u", u, (T, d), "[T, d] of the system")

  def step(h, token):
    (transition, write, read, direct), u_t = token
    h = transition * h + write @ u_t
    return h, read @ h + direct @ u_t

  start = jnp.zeros(system.transition.shape[1], jnp.result_type(*system, u))
  return jax.lax.scan(step, start, (system, u))[1]


def kernel(system: System) -> jax.Array:
  """Phi [T, T, d, d] of eq. 12, zero for j > i.

  Raises:
    ValueError: shapes do not agree.
  """
  T, N, _ = _checked(system).write.shape
  rows = []
  for i in range(T):
    product, row = jnp.ones(N, system.transition.dtype), []
    for j in range(i, -1, -1):
      row.append(system.read[i] @ (product[:, None] * system.write[j]))
      product = product * system.transition[j]
    row[0] = row[0] + system.direct[i]
    rows.append(row[::-1] + [jnp.zeros_like(row[0])] * (T - 1 - i))
  return jnp.stack([jnp.stack(row) for row in rows])


def attention(q: jax.Array, k: jax.Array, eta: jax.Array, values: jax.Array) -> System:
  """Generalized linear attention, eqs. 15 and 27: y_i = sum_j (q_i . k_j) v_j / eta_i, per head.

  Args:
    q, k: [T, H, n], the features phi(q_i) and psi(k_j).
    eta: [T, H], not 0.
    values: W_V [d, d], v_j = W_V u_j; each head has d / H of its rows.

  Raises:
    ValueError: shapes do not agree, or the heads do not divide d.
  """
  check_shape(_NAME, "q", q, (None,) * 3, "[T, H, n]")
  T, H, n = q.shape
  check_shape(_NAME, "k", k, (T, H, n), "the shape of q, [T, H, n]")
  check_shape(_NAME, "eta", eta, (T, H), "[T, H] of q")
  check_shape(_NAME, "values", values, (None, None), "[d, d]")
  d = values.shape[1]
  check_shape(_NAME, "values", values, (d, d), "[d, d]")
  if d % H:
    raise ValueError(f"{_NAME}: values has d={d} rows, which H={H} heads of q do not divide.")
  ratio = jnp.concatenate([jnp.ones_like(eta[:1]), eta[:-1] / eta[1:]])
  by_channel = lambda x: jnp.repeat(x, d // H, axis=1)  # [T, H, ...] -> [T, d, ...]
  write = by_channel(k / eta[..., None])[..., None] * values[:, None]  # [T, d, n, d]
  transition = jnp.broadcast_to(by_channel(ratio)[..., None], (T, d, n))
  read = by_channel(q)[:, :, None] * jnp.eye(d)[:, :, None]  # [T, d, d, n]
  return System(
    transition.reshape(T, d * n),
    write.reshape(T, d * n, d),
    read.reshape(T, d, d * n),
    jnp.zeros((T, d, d), write.dtype),
  )


def selective(dt: jax.Array, rates: jax.Array, b: jax.Array, c: jax.Array, skip) -> System:
  """S6, eqs. 4 and 18: Lambda_i = exp(-dt_i A), B_i = dt_i b_i, C_i = c_i^T for each channel.

  Args:
    dt: [T, d], positive. rates: A [d, n], positive.
    b, c: [T, n]. skip: [d], the diagonal of D.

  Raises:
    ValueError: shapes do not agree.
  """
  check_shape(_NAME, "dt", dt, (None, None), "[T, d]")
  T, d = dt.shape
  check_shape(_NAME, "rates", rates, (d, None), "[d] of dt, then n")
  n = rates.shape[1]
  for name, x in (("b", b), ("c", c)):
    check_shape(_NAME, name, x, (T, n), "[T] of dt, then n of rates")
  check_shape(_NAME, "skip", skip, (d,), "[d] of dt")
  one = jnp.eye(d)[:, None]  # [d, 1, d]
  write = (dt[..., None] * b[:, None])[..., None] * one
  read = c[:, None, None] * jnp.eye(d)[:, :, None]
  return System(
    jnp.exp(-dt[..., None] * rates).reshape(T, d * n),
    write.reshape(T, d * n, d),
    read.reshape(T, d, d * n),
    jnp.broadcast_to(jnp.diag(skip), (T, d, d)),
  )


def enlarge(system: System, other: System) -> System:
  """Lemma 2: the system with the states of another, which it does not read; y stays the same.

  Raises:
    ValueError: the two have another T or d.
  """
  T, _, d = _checked(system).write.shape
  check_shape(_NAME, "other.write", _checked(other).write, (T, None, d), "[T, any, d]")
  return System(
    jnp.concatenate([system.transition, other.transition], axis=1),
    jnp.concatenate([system.write, other.write], axis=1),
    jnp.concatenate([system.read, jnp.zeros_like(other.read)], axis=2),
    system.direct,
  )


def taylor_features(x: jax.Array, order: int) -> jax.Array:
  """Lemma 1: phi(x), [..., K] -> [..., 1 + K + ... + K^order], with phi(q) . phi(k) near e^(q . k).

  Their product is the Taylor polynomial of e^s at s = q . k: softmax attention is the system of
  `attention` with these features and eta their sum, up to |s|^(order + 1) e^|s| / (order + 1)!.

  Raises:
    ValueError: `order` is negative.
  """
  if order < 0:
    raise ValueError(f"{_NAME}: order={order} must be 0 or more.")
  power = jnp.ones_like(x[..., :1])
  features = [power]
  for p in range(1, order + 1):
    power = (power[..., None] * x[..., None, :]).reshape(*x.shape[:-1], -1)
    features.append(power / math.sqrt(math.factorial(p)))
  return jnp.concatenate(features, axis=-1)


def system_of(mixer: Any, x: jax.Array) -> System:
  """A layer and its input x [T, d] as a system: `apply(system_of(mixer, x), x)` is mixer(x).

  Its last projection W_o is part of C and D.

  Raises:
    ValueError: the layer is not one of `LAYERS`, or it has a bias in W_v or W_o, which is no linear
      map of u.
  """
  make = LAYERS.get(type(mixer))
  if make is None:
    names = ", ".join(cls.__name__ for cls in LAYERS)
    raise ValueError(f"{_NAME}: mixer is a {type(mixer).__name__}; systems are made of: {names}.")
  for name in ("v_proj", "o_proj"):
    if getattr(getattr(mixer, name, None), "bias", None) is not None:
      raise ValueError(f"{_NAME}: mixer.{name} has a bias; build the layer with use_bias=False.")
  system = make(mixer, jnp.asarray(x)[None])
  output = wide(mixer.o_proj.kernel[...]).T
  return system._replace(read=output @ system.read, direct=output @ system.direct)


def _linear_attention(mixer, x):
  q, k, _ = mixer._queries_keys_values(x)
  eta = jnp.ones(q.shape[1:3], q.dtype)
  if mixer.feature_map == "elu":
    q, k = _elu_plus_one(q), _elu_plus_one(jnp.maximum(k, _LOWEST_KEY))
    eta = jnp.sum(q * jnp.cumsum(k, axis=1), axis=-1)[0]
  return attention(q[0], k[0], eta, wide(mixer.v_proj.kernel[...]).T)


def _normalized_attention(mixer, x):
  q, k, _ = mixer._queries_keys_values(x)
  return attention(q[0], k[0], mixer._eta(x)[0], wide(mixer.v_proj.kernel[...]).T)


def _selective(mixer, x):
  r, b, c = jnp.split(wide(mixer.x_proj(x)), [mixer.rank, mixer.rank + mixer.state_dim], axis=-1)
  dt = jax.nn.softplus(mixer._step_logits(r))
  return selective(dt[0], mixer._rates(), b[0], c[0], wide(mixer.skip[...]))


LAYERS: dict[type, Callable[[Any, jax.Array], System]] = {
  LinearAttention: _linear_attention,
  NormalizedAttention: _normalized_attention,
  S6: _selective,
  SSD: _selective,
}


def _checked(system):
  check_shape(_NAME, "write", system.write, (None,) * 3, "[T, N, d]")
  T, N, d = system.write.shape
  check_shape(_NAME, "transition", system.transition, (T, N), "[T, N] of write")
  check_shape(_NAME, "read", system.read, (T, d, N), "[T, d, N] of write")
  check_shape(_NAME, "direct", system.direct, (T, d, d), "[T, d, d] of write")
  return system
