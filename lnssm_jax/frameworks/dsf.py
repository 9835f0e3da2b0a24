r"""The dynamical-systems framework: layers as linear systems with data-dependent matrices.

    h_i = Lambda_i h_{i-1} + B_i u_i,      y_i = C_i h_i + D_i u_i,      h before the first token: 0

Lambda_i is diagonal, N x N; B_i is N x d, C_i d x N, D_i d x d. Unrolled, y = Phi u with (eq. 12)

    Phi_ij = C_i Lambda_i ... Lambda_{j+1} B_j  for j < i,      Phi_ii = C_i B_i + D_i,      0 above

`systems` writes the recurrences inside any layer as such matrices, with u the values that they mix;
`system_of` a whole layer of the paper, with u its input. `apply` runs them and `kernel` makes Phi.
All are for equations and tests, one sequence at a time: a system has T N d numbers.

Source: Understanding the Differences in Foundation Models (Sieber et al. 2024), sections 2 and 3.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.frameworks.layers import Recurrence, recurrences
from lnssm_jax.mixers import S6, SSD, LinearAttention, NormalizedAttention
from lnssm_jax.ops.core.checks import check_shape
from lnssm_jax.ops.core.precision import wide

_NAME = "dsf"


class System(NamedTuple):
  """The matrices of T tokens."""

  transition: jax.Array  # [T, N], the diagonal of Lambda
  write: jax.Array  # [T, N, d], B
  read: jax.Array  # [T, d, N], C; d may differ from that of B
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
  T, N, d = _checked(system).write.shape

  def step(written, token):
    """`written` [T, N, d] has Lambda_i ... Lambda_{j+1} B_j for the tokens j so far."""
    i, (transition, write, read, direct) = token
    written = (transition[:, None] * written).at[i].set(write)
    return written, (read @ written).at[i].add(direct)

  start = jnp.zeros((T, N, d), jnp.result_type(*system))
  return jax.lax.scan(step, start, (jnp.arange(T), system))[1]


def systems(mixer: Any, x: jax.Array) -> list[System]:
  """`system` of each of the `recurrences` of a layer for its input x [T, d].

  Raises:
    ValueError: the layer has none, or they are not systems; the message says why.
  """
  return [system(recurrence) for recurrence in recurrences(mixer, x)]


def system(recurrence: Recurrence) -> System:
  """A recurrence as a system, u [T, H V] -> out [T, H V], after eq. 15: divided by eta, if any.

  The state of channel (h, v) has K numbers, so N = H V K:

      Lambda_i = (eta_{i-1} / eta_i) o_i,  B_i = rate_i e_i / eta_i,  C_i = s_i^T,  D_i = direct_i

  Raises:
    ValueError: Lambda would not be diagonal.
  """
  if recurrence.product == "matrix":
    raise ValueError(
      f"{_NAME}: the {recurrence.op} has Lambda_i = a_i (I - beta_i k_i e_i^T), which is not "
      "diagonal, and no one change of basis makes all of them so; `lcsm` covers it."
    )
  by_channel = lambda z: jnp.swapaxes(z, 2, 3).reshape(len(z), -1, z.shape[2])  # [T, H V, K]
  columns = jnp.ones_like(recurrence.rate)[:, :, None]
  write = recurrence.e[..., None] * (recurrence.rate / recurrence.eta[..., None])[:, :, None]
  made = _of_channels(
    by_channel(recurrence.o * _ratio(recurrence.eta)[..., None, None]),
    by_channel(write),
    by_channel(recurrence.s[..., None] * columns),
    recurrence.direct.reshape(len(write), -1),
  )
  sums = lambda z: z.reshape(len(z), recurrence.copies, -1, z.shape[2]).sum(1)
  return made._replace(read=sums(made.read), direct=sums(made.direct))


def _ratio(eta):
  """eta_{i-1} / eta_i, of eq. 15; the first multiplies a state of zeros."""
  return jnp.concatenate([jnp.ones_like(eta[:1]), eta[:-1] / eta[1:]])


def _of_channels(transition, write, read, direct) -> System:
  """The system of d channels with n states each: arrays [T, d, n], and direct [T, d]."""
  T, d, n = transition.shape
  one = jnp.eye(d)
  return System(
    transition.reshape(T, d * n),
    (write[..., None] * one[:, None]).reshape(T, d * n, d),
    (read[:, None] * one[..., None]).reshape(T, d, d * n),
    direct[..., None] * one,
  )


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
  by_channel = lambda x: jnp.repeat(jnp.broadcast_to(x, (T, H, n)), d // H, axis=1)
  made = _of_channels(
    by_channel(_ratio(eta)[..., None]),
    by_channel(k / eta[..., None]),
    by_channel(q),
    jnp.zeros((T, d), q.dtype),
  )
  return made._replace(write=made.write @ values)


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
  return _of_channels(
    jnp.exp(-dt[..., None] * rates),
    dt[..., None] * b[:, None],
    jnp.broadcast_to(c[:, None], (T, d, n)),
    jnp.broadcast_to(skip, (T, d)),
  )


def forget_gate(z: jax.Array, rates: jax.Array) -> jax.Array:
  """Eq. 22: sigmoid(-z)^A = exp(-A softplus(z)), the decay of S6 for dt = softplus(z), [T, d, n].

  Args:
    z: [T, d] floating point, what the softplus of the layer is given; sigmoid(-z) is the gate of
      qLSTM.
    rates: A [d, n] floating point, positive.

  Returns:
    [T, d, n] of their common dtype; right where sigmoid(-z) is too small for it.

  Raises:
    ValueError: shapes do not agree.
  """
  check_shape(_NAME, "z", z, (None, None), "[T, d]")
  check_shape(_NAME, "rates", rates, (z.shape[1], None), "[d] of z, then n")
  return jnp.exp(rates * jax.nn.log_sigmoid(-z)[..., None])


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


LAYERS = (LinearAttention, NormalizedAttention, S6, SSD)


def system_of(mixer: Any, x: jax.Array) -> System:
  """A whole layer and its input x [T, d] as a system: `apply(system_of(mixer, x), x)` is mixer(x).

  W_V is part of B, and W_o of C and D.

  Raises:
    ValueError: the layer is not one of `LAYERS`, or it has a bias in W_v or W_o, which is no linear
      map of u.
  """
  if type(mixer) not in LAYERS:
    names = ", ".join(cls.__name__ for cls in LAYERS)
    raise ValueError(
      f"{_NAME}: mixer is a {type(mixer).__name__}; these are systems of their input: {names}. "
      "Take `systems(mixer, x)`, of the values that its recurrences mix."
    )
  for name in ("v_proj", "o_proj"):
    if getattr(getattr(mixer, name, None), "bias", None) is not None:
      raise ValueError(f"{_NAME}: mixer.{name} has a bias; build the layer with use_bias=False.")
  (recurrence,) = recurrences(mixer, x)
  if isinstance(mixer, NormalizedAttention):
    recurrence = recurrence._replace(eta=mixer._eta(jnp.asarray(x)[None])[0])
  made = system(recurrence)
  output = wide(mixer.o_proj.kernel[...]).T
  made = made._replace(read=output @ made.read, direct=output @ made.direct)
  if not hasattr(mixer, "v_proj"):
    return made
  values = wide(mixer.v_proj.kernel[...]).T
  return made._replace(write=made.write @ values, direct=made.direct @ values)


def _checked(system):
  check_shape(_NAME, "write", system.write, (None,) * 3, "[T, N, d]")
  T, N, d = system.write.shape
  check_shape(_NAME, "transition", system.transition, (T, N), "[T, N] of write")
  check_shape(_NAME, "read", system.read, (T, None, N), "[T], outputs, [N] of write")
  outputs = system.read.shape[1]
  check_shape(_NAME, "direct", system.direct, (T, outputs, d), "outputs of read, d of write")
  return system
