"""Tests particular to longhorn_scan; the contract suite covers the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax.ops.longhorn_scan.api import longhorn_scan
from lnssm_jax.ops.longhorn_scan.gains import gain_and_decay
from lnssm_jax.ops.longhorn_scan.types import LonghornState
from tests.ops import promises
from tests.ops.promises import close

B, D, N = 2, 3, 4
STEPS = ["x", "beta", "k", "q"]


def make_inputs(T, seed=0, dtype=jnp.float32):
  rng = np.random.default_rng(seed)
  inputs = {
    "x": rng.normal(size=(B, T, D)),
    "beta": 1 / (1 + np.exp(rng.normal(size=(B, T, D)))),
    "k": rng.normal(size=(B, T, N)),
    "q": rng.normal(size=(B, T, N)),
    "skip": rng.normal(size=D),
  }
  return {name: jnp.asarray(x, dtype) for name, x in inputs.items()}


def call(inputs, **options):
  options = {"chunk_size": 2, "skip": inputs["skip"]} | options
  return longhorn_scan(*(inputs[name] for name in STEPS), **options)


def in_float64(inputs):
  return {name: np.asarray(x, np.float64) for name, x in inputs.items()}


def states(inputs):
  """S_0 .. S_T by the definition, in float64, with the gains and decays."""
  x, beta, k = (in_float64(inputs)[name] for name in ("x", "beta", "k"))
  gain = beta / (1 + beta * np.sum(k**2, -1, keepdims=True))
  decay = 1 - gain[..., None] * k[:, :, None] ** 2
  S = [np.zeros((B, D, N))]
  for t in range(x.shape[1]):
    S.append(decay[:, t] * S[-1] + (gain * x)[:, t, :, None] * k[:, t, None])
  return S, gain, decay


def test_longhorn_scan_equals_its_definition():
  inputs = make_inputs(11)
  S, _, _ = states(inputs)
  want = np.stack([np.einsum("bdn,bn->bd", S[t + 1], inputs["q"][:, t]) for t in range(11)], 1)
  close(call(inputs)[0], want + in_float64(inputs)["skip"] * in_float64(inputs)["x"])


@pytest.mark.slow
def test_longhorn_scan_gradients_equal_the_published_formulas():
  """Longhorn's gradients of ε, β, x and k, which subtract from 1, token by token in float64."""
  T = 7
  inputs = make_inputs(T)
  x, beta, k, q, skip = (in_float64(inputs)[n] for n in (*STEPS, "skip"))
  G = np.random.default_rng(5).normal(size=(B, T, D)).astype(np.float32)
  S, gain, decay = states(inputs)
  want = {name: np.zeros_like(value) for name, value in in_float64(inputs).items()}
  adjoint = np.zeros((B, D, N))
  for t in reversed(range(T)):
    following = decay[:, t + 1] if t + 1 < T else 0.0
    adjoint = G[:, t, :, None] * q[:, t, None] + following * adjoint
    k_t, gain_t, x_t = k[:, t, None], gain[:, t, :, None], x[:, t, :, None]
    d_gain = np.sum(adjoint * (-(k_t**2) * S[t] + x_t * k_t), axis=-1)
    want["beta"][:, t] = d_gain / (1 + beta[:, t] * np.sum(k_t**2, -1)) ** 2
    want["x"][:, t] = gain[:, t] * np.sum(adjoint * k_t, axis=-1) + skip * G[:, t]
    direct = np.sum(adjoint * (-2 * gain_t * k_t * S[t] + gain_t * x_t), axis=1)
    want["k"][:, t] = direct - 2 * k[:, t] * np.sum(d_gain * gain[:, t] ** 2, -1, keepdims=True)
    want["q"][:, t] = np.einsum("bdn,bd->bn", S[t + 1], G[:, t])
  want["skip"] = np.sum(G * x, axis=(0, 1))
  close(jax.jit(jax.grad(lambda inputs: jnp.sum(call(inputs)[0] * G)))(inputs), want)


def objective(S, before, k, x, beta):
  """The objective of one token (Longhorn, equation 5), per row of the state."""
  return np.sum((S - before) ** 2, -1) + beta * (S @ k - x) ** 2


@pytest.mark.slow
def test_longhorn_scan_approximates_the_exact_minimizer():
  rng = np.random.default_rng(2)
  before, k, x = rng.normal(size=(D, N)), rng.normal(size=N), rng.normal(size=D)
  beta = rng.random(D)
  one_hot = np.eye(N)[1] * 1.7
  with jax.enable_x64(True):
    one_step = lambda k: np.asarray(
      longhorn_scan(
        *(jnp.asarray(z)[None, None] for z in (x, beta, k, k)),
        initial_state=LonghornState(jnp.asarray(before)[None]),
      )[1].h[0]
    )
    diagonal, diagonal_of_one_hot = one_step(k), one_step(one_hot)

  def exact(k):
    gain = (beta / (1 + beta * np.sum(k**2)))[:, None]
    return before - gain * (before @ k)[:, None] * k + gain * x[:, None] * k

  best = objective(exact(k), before, k, x, beta)
  stationary = (exact(k) - before) + (beta * (exact(k) @ k - x))[:, None] * k
  np.testing.assert_allclose(stationary, 0, atol=1e-14)  # of a convex function: the minimum
  for size in (1e-3, 1e-1, 1):
    nearby = exact(k) + size * rng.normal(size=(100, D, N))
    assert (objective(nearby, before, k, x, beta) > best).all()
  assert (objective(diagonal, before, k, x, beta) > best).all()
  np.testing.assert_allclose(diagonal_of_one_hot, exact(one_hot), rtol=1e-14)


def hard_keys():
  """Keys from 1e-3 to 1e6, zeros, and such with one entry that is nearly all; beta from 0 to 1."""
  rng = np.random.default_rng(4)
  k = rng.normal(size=(400, N)) * 10 ** rng.uniform(-3, 2, size=(400, 1))
  k[::3, 0] *= 1e4
  k[::7, 1] = 0
  beta = rng.random((400, D))
  beta[::11] = [0, 1, 1e-6]
  return jnp.asarray(beta, jnp.float32), jnp.asarray(k, jnp.float32)


def test_longhorn_decays_any_keys_are_between_0_and_1():
  beta, k = hard_keys()
  gain, decay = jax.jit(gain_and_decay)(beta, k)
  assert (decay > 0).all() and (decay <= 1).all()
  assert (jnp.where(k[:, None] == 0, decay, 1) == 1).all()
  as_written = 1 - gain[..., None] * k[:, None] ** 2
  assert (as_written <= 0).any()  # what the definition gives in float32


def test_longhorn_gains_and_derivatives_are_accurate_per_entry():
  """Where 1 - ε k² has no correct digit, each value and derivative has nearly all of its own."""
  beta, k = hard_keys()
  one = lambda beta, k: tuple(x[0] for x in gain_and_decay(beta[None], k))
  each = lambda beta, k: (one(beta, k), jax.jacrev(one, argnums=(0, 1))(beta, k))
  got = jax.jit(jax.vmap(jax.vmap(each, (0, None))))(beta, k)

  b, k = np.asarray(beta, np.float64)[..., None], np.asarray(k, np.float64)[:, None]  # [., D, N]
  others = np.stack([np.delete(k**2, i, axis=-1).sum(-1) for i in range(N)], -1)
  w = 1 / (1 + b * np.sum(k**2, -1, keepdims=True))
  gain, decay = b * w, (1 + b * others) * w
  by_key = 2 * (gain * k)[..., :, None] ** 2 * k[..., None, :]
  own = np.arange(N)
  by_key[..., own, own] = -2 * gain * decay * k
  d_gain = (w[..., 0] ** 2, -2 * gain**2 * k)
  want = ((gain[..., 0], decay), (d_gain, (-((k * w) ** 2), by_key)))
  limit = promises.contract.tolerance(jnp.float32, 1)
  jax.tree.map(
    lambda value, exact: np.testing.assert_allclose(value, exact, rtol=limit, atol=1e-32),
    got,
    want,
  )


@pytest.mark.slow
def test_longhorn_scan_has_no_exponential():
  loss = lambda inputs: jnp.sum(call(inputs)[0] ** 2)
  compiled = jax.jit(jax.grad(loss)).lower(make_inputs(5)).compile().as_text()
  assert "multiply(" in compiled
  for word in ("exponential(", "exponential-minus-one(", "logistic(", "power(", "log(", "tanh("):
    assert word not in compiled


def test_longhorn_scan_float16_large_squares_do_not_overflow():
  """The square of 300 is beyond float16's 65504."""
  inputs = make_inputs(5, dtype=jnp.float16)
  out, _ = call(inputs | {"k": 300 * inputs["k"]})
  assert jnp.isfinite(out).all()


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"x": (B, 6)}, r"x has shape \(2, 6\).*\[B, T, D\]"),
    ({"x": (B, 0, D), "beta": (B, 0, D), "k": (B, 0, N), "q": (B, 0, N)}, "T >= 1"),
    ({"beta": (B, 6, 1)}, r"beta has shape \(2, 6, 1\).*\[2, 6, 3\]"),
    ({"k": (B, 5, N)}, r"k has shape \(2, 5, 4\)"),
    ({"q": (B, 6, D)}, r"q has shape \(2, 6, 3\).*the shape of k"),
    ({"skip": (N,)}, r"skip has shape \(4,\)"),
    ({"k": jnp.zeros((B, 6, N), int)}, "k has dtype int32; it must be floating point"),
    ({"initial_state": LonghornState(jnp.zeros((B, N, D)))}, r"initial_state.h has shape"),
    ({"chunk_size": 48}, "chunk_size=48 must be a power of two"),
    ({"beta_bias": (D,)}, r"beta_bias has shape \(3,\), but beta is used as it is"),
    ({"beta_bias": (N,), "beta_sigmoid": True}, r"beta_bias has shape \(4,\).*\[D\] of x"),
  ],
)
def test_longhorn_scan_bad_argument_raises_naming_it(change, message):
  arguments = {"x": (B, 6, D), "beta": (B, 6, D), "k": (B, 6, N), "q": (B, 6, N)} | change
  arguments = {n: jnp.zeros(x) if type(x) is tuple else x for n, x in arguments.items()}
  with pytest.raises(ValueError, match=message):
    longhorn_scan(**arguments)
