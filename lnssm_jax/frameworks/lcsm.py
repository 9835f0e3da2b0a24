r"""Linear complexity sequence models: the recurrence of the framework and its backward pass.

    m_t = psi(o_t, m_{t-1}) + e_t i_t^T,      y_t = m_t^T s_t,      m_0 = `initial`

psi is the product of entries, with o_t [k, d] (type 1), or of matrices, with o_t [k, k] (type 2).
With dy the cotangent of y and Lambda_t that of m_t, everything after t included,

    type 1   Lambda_t = s_t dy_t^T + o_{t+1} * Lambda_{t+1},      do_t = Lambda_t * m_{t-1}
    type 2   Lambda_t = s_t dy_t^T + o_{t+1}^T Lambda_{t+1},      do_t = Lambda_t m_{t-1}^T
    both     ds_t = m_t dy_t,   de_t = Lambda_t i_t,   di_t = Lambda_t^T e_t

These differ from section 5.1 of the paper, which has m_t in place of m_{t-1} in do, and in type 2
o_{t+1} without its transpose; the error reaches de and di through Lambda. The tests compare both
with automatic differentiation: the formulas here agree, the printed ones do not.

`streams` writes the recurrences inside a layer in this form, and `describe` makes their row of the
paper's table 1: which of e, o, s depend on the token, and along which axes o differs.

Source: Unlocking the Secrets of Linear Complexity Sequence Model (Qin et al. 2024), section 2, eqs.
1 to 8, and section 5.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax.frameworks.layers import Recurrence, recurrences
from lnssm_jax.mixers.common.checks import check_choice
from lnssm_jax.ops.core.checks import check_floating, check_shape

_NAME = "lcsm"


class Streams(NamedTuple):
  """The inputs of the recurrence, one row per token; or their cotangents."""

  e: jax.Array  # [T, k], expansion
  o: jax.Array  # [T, k, d], or [T, k, k] for matrix products: oscillation
  s: jax.Array  # [T, k], shrinkage
  i: jax.Array  # [T, d], input


class _Product(NamedTuple):
  """psi, and its two derivatives."""

  apply: Callable  # (o, m) -> psi(o, m)
  to_state: Callable  # (o, Lambda) -> cotangent of m
  to_oscillation: Callable  # (Lambda, m) -> cotangent of o


PRODUCTS = {
  "elementwise": _Product(lambda o, m: o * m, lambda o, c: o * c, lambda c, m: c * m),
  "matrix": _Product(lambda o, m: o @ m, lambda o, c: o.T @ c, lambda c, m: c @ m.T),
}


def recurrence(
  streams: Streams, initial: jax.Array | None = None, *, product: str = "elementwise"
) -> tuple[jax.Array, jax.Array]:
  """The outputs y [T, d], and the states m [T, k, d] after each token, in the dtype of `streams`.

  One token at a time, for equations and tests: the mixer `LCSM` has the fast forms.

  Args:
    streams: e [T, k], o [T, k, d] (or [T, k, k]), s [T, k], i [T, d], real or complex.
    initial: m_0 [k, d]; None means zeros.
    product: psi, "elementwise" or "matrix".

  Raises:
    ValueError: shapes or dtypes do not agree, or `product` is unknown.
  """
  streams, initial, psi = _checked(streams, initial, product)

  def step(m, token):
    m = psi.apply(token.o, m) + jnp.outer(token.e, token.i)
    return m, (m.T @ token.s, m)

  return jax.lax.scan(step, initial, streams)[1]


def backward(
  streams: Streams,
  dy: jax.Array,
  initial: jax.Array | None = None,
  *,
  product: str = "elementwise",
) -> tuple[Streams, jax.Array]:
  """The cotangents of the streams and of m_0 [k, d] for that of y [T, d], by the formulas above.

  Of complex streams they follow JAX's convention, in which nothing is conjugated.

  Args:
    streams, initial, product: as in `recurrence`.
    dy: [T, d], the cotangent of y.

  Raises:
    ValueError: shapes or dtypes do not agree, or `product` is unknown.
  """
  streams, initial, psi = _checked(streams, initial, product)
  check_shape(_NAME, "dy", dy, streams.i.shape, "the shape of i, [T, d]")
  _, states = recurrence(streams, initial, product=product)
  before = jnp.concatenate([initial[None], states[:-1]])

  def step(later, token):
    """`later` is psi's cotangent of m_t from the token after it."""
    now, dy_t, m, m_before = token
    cotangent = jnp.outer(now.s, dy_t) + later
    gradients = Streams(
      e=cotangent @ now.i,
      o=psi.to_oscillation(cotangent, m_before),
      s=m @ dy_t,
      i=cotangent.T @ now.e,
    )
    return psi.to_state(now.o, cotangent), gradients

  tokens = (streams, jnp.asarray(dy), states, before)
  d_initial, gradients = jax.lax.scan(step, jnp.zeros_like(initial), tokens, reverse=True)
  return gradients, d_initial


def streams(recurrence: Recurrence) -> Streams:
  """A recurrence of a layer as streams [H, T, ...] of H heads; its product is `recurrence.product`.

  `jax.vmap(recurrence)` of them, plus what passes the state by (`direct` u), is what the op gives.
  """
  r = recurrence
  s, i = r.s / r.eta[..., None], r.rate * r.u
  return Streams(*(jnp.moveaxis(z, 1, 0) for z in (r.e, r.o, s, i)))


class Description(NamedTuple):
  """A row of table 1: what a recurrence of a layer is.

  Of e, o, s: "1", "constant" (a parameter), "position" or "token" (computed from the input).
  """

  op: str
  product: str
  e: str
  o: str
  s: str
  # Along which axes o differs: "" (one number per head), "k", "d", "k d" (an outer product, as a
  # decay of both), "k x d" (every entry), "k x k" (a matrix).
  axes: str
  memory: tuple[int, int, int]  # heads, k, d


def describe(mixer: Any, length: int = 5, *, seed: int = 0) -> list[Description]:
  """The rows of a layer's recurrences, found by running it, as it is, on two random inputs.

  Raises:
    ValueError: the layer is no such recurrence (`frameworks.recurrences`).
  """
  found: list[Recurrence] = []

  def run(x):
    found[:] = recurrences(mixer, x)
    return [streams(r) for r in found]

  inputs = np.random.default_rng(seed).normal(size=(2, length, mixer.dim))
  first, second = map(jax.jit(run), inputs.astype(jnp.result_type(float)))
  rows = zip(found, first, second, strict=True)
  return [
    Description(
      r.op,
      r.product,
      *(_source(getattr(one, name), getattr(other, name)) for name in ("e", "o", "s")),
      axes="k x k" if r.product == "matrix" else _axes(np.asarray(one.o)),
      memory=(r.e.shape[1], r.e.shape[2], r.u.shape[2]),
    )
    for r, one, other in rows
  ]


def _source(one, other) -> str:
  """Of a stream [H, T, ...], for two inputs."""
  if not np.allclose(one, other):
    return "token"
  if not np.allclose(one, one[:, :1]):
    return "position"
  return "1" if np.allclose(one, 1) else "constant"


def _axes(o) -> str:
  by_k, by_d = (not np.allclose(o, np.take(o, [0], axis)) for axis in (2, 3))
  if by_k and by_d:
    outer = o[..., :1] * o[:, :, :1] / o[:, :, :1, :1]
    return "k d" if np.allclose(o, outer) else "k x d"
  return "k" * by_k + "d" * by_d


def _checked(streams, initial, product):
  psi = PRODUCTS[check_choice("product", product, PRODUCTS)]
  streams = Streams(*map(jnp.asarray, streams))
  for name, x in streams._asdict().items():
    if not jnp.iscomplexobj(x):
      check_floating(_NAME, name, x)
  check_shape(_NAME, "e", streams.e, (None, None), "[T, k]")
  T, k = streams.e.shape
  check_shape(_NAME, "s", streams.s, (T, k), "the shape of e, [T, k]")
  check_shape(_NAME, "i", streams.i, (T, None), "[T] of e, then d")
  d = streams.i.shape[1]
  columns = d if product == "elementwise" else k
  check_shape(_NAME, "o", streams.o, (T, k, columns), f"o of product={product!r}")
  dtype = jnp.result_type(*streams)
  if initial is None:
    initial = jnp.zeros((k, d), dtype)
  check_shape(_NAME, "initial", initial, (k, d), "[k, d]")
  return Streams(*(x.astype(dtype) for x in streams)), jnp.asarray(initial, dtype), psi
