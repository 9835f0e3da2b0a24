"""Tests particular to selective_scan; the contract suite covers the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax.ops.core import diagonal_chunks
from lnssm_jax.ops.selective_scan.api import selective_scan
from lnssm_jax.ops.selective_scan.types import SelectiveState
from tests.ops import promises
from tests.ops.promises import close

B, D, N = 2, 3, 4
NAMES = ["x", "dt", "a", "b", "c"]


def make_inputs(T, seed=0):
  rng = np.random.default_rng(seed)
  inputs = {
    "x": rng.normal(size=(B, T, D)),
    "dt": np.exp(rng.uniform(-4, 1, size=(B, T, D))),
    "b": rng.normal(size=(B, T, N)),
    "c": rng.normal(size=(B, T, N)),
    "a": -np.exp(rng.normal(size=(D, N))),
    "skip": rng.normal(size=D),
  }
  return {name: jnp.asarray(x, jnp.float32) for name, x in inputs.items()}


def call(inputs, **options):
  options = {"chunk_size": 2, "skip": inputs["skip"]} | options
  return selective_scan(*(inputs[name] for name in NAMES), **options)


def in_float64(inputs):
  return {name: np.asarray(x, np.float64) for name, x in inputs.items()}


def test_selective_scan_equals_the_explicit_sum():
  """out_t = sum over j <= t of exp(a sum of dt over j < i <= t) dt_j x_j b_j c_t, in float64."""
  inputs = make_inputs(11)
  x, dt, a, b, c, skip = (in_float64(inputs)[n] for n in (*NAMES, "skip"))
  want = skip * x
  for t in range(11):
    for j in range(t + 1):
      weight = np.exp(dt[:, j + 1 : t + 1].sum(1)[..., None] * a)
      want[:, t] += np.einsum("bdn,bd,bn,bn->bd", weight, dt[:, j] * x[:, j], b[:, j], c[:, t])
  close(call(inputs)[0], want)


@pytest.mark.slow
def test_selective_scan_gradients_equal_the_derived_recursion():
  """The lines of README.md, token by token in float64."""
  T = 7
  inputs = make_inputs(T)
  x, dt, a, b, c, skip = (in_float64(inputs)[n] for n in (*NAMES, "skip"))
  G = np.random.default_rng(5).normal(size=(B, T, D)).astype(np.float32)
  decay, S = np.exp(dt[..., None] * a), np.zeros((T + 1, B, D, N))
  for t in range(T):
    S[t + 1] = decay[:, t] * S[t] + (dt * x)[:, t, :, None] * b[:, t, None]
  want = {name: np.zeros_like(value) for name, value in in_float64(inputs).items()}
  adjoint = np.zeros((B, D, N))
  for t in reversed(range(T)):
    following = decay[:, t + 1] if t + 1 < T else 0.0
    adjoint = G[:, t, :, None] * c[:, t, None] + following * adjoint
    E = adjoint * S[t] * decay[:, t]
    by_input = np.einsum("bdn,bn->bd", adjoint, b[:, t])
    want["a"] += np.sum(dt[:, t, :, None] * E, axis=0)
    want["dt"][:, t] = np.sum(a * E, axis=-1) + x[:, t] * by_input
    want["x"][:, t] = dt[:, t] * by_input + skip * G[:, t]
    want["b"][:, t] = np.einsum("bdn,bd->bn", adjoint, dt[:, t] * x[:, t])
    want["c"][:, t] = np.einsum("bdn,bd->bn", S[t + 1], G[:, t])
  want["skip"] = np.sum(G * x, axis=(0, 1))
  close(jax.jit(jax.grad(lambda inputs: jnp.sum(call(inputs)[0] * G)))(inputs), want)


def test_selective_scan_gradient_of_a_strong_rate_is_accurate_per_entry():
  """A rate of -20 has a gradient of 1e-9 of its neighbors': each must be accurate."""
  T = 24
  inputs = jax.tree.map(jnp.abs, make_inputs(T))  # terms of one sign
  inputs |= {"a": -jnp.linspace(0.01, 20.0, D * N).reshape(D, N), "dt": jnp.ones((B, T, D))}

  def gradient(implementation, inputs):
    loss = lambda a: jnp.sum(call(inputs | {"a": a}, implementation=implementation)[0])
    return np.asarray(jax.jit(jax.grad(loss))(inputs["a"]))

  with jax.enable_x64(True):
    want = gradient("reference", {n: x.astype(jnp.float64) for n, x in inputs.items()})
  got = gradient("chunked", inputs)
  np.testing.assert_allclose(got, want, rtol=promises.contract.tolerance(jnp.float32, T))
  assert np.abs(want).min() < 1e-7 < np.abs(want).max()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=pytest.mark.slow)])
def test_selective_scan_in_an_accelerators_blocks_equals_float64(dtype, monkeypatch):
  """Documents, padding of the last block, all gradients."""
  T = 5
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  monkeypatch.setattr(diagonal_chunks, "_LONGEST_BLOCK", 2)
  segment_ids = jnp.asarray([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]])
  inputs = {name: x.astype(dtype).astype(jnp.float32) for name, x in make_inputs(T).items()}

  def results(implementation, inputs):
    def loss(inputs):
      options = {"segment_ids": segment_ids, "implementation": implementation, "chunk_size": None}
      out, state = call(inputs, **options)
      return jnp.sum(out.astype(state.h.dtype) ** 2) + jnp.sum(state.h), (out, state.h)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(inputs)

  with jax.enable_x64(True):
    want = results("reference", {n: jnp.asarray(x, jnp.float64) for n, x in inputs.items()})
  got = results("chunked", {n: x.astype(dtype) for n, x in inputs.items()})
  for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    error = promises.contract.relative_error(np.asarray(g, np.float64), np.asarray(w))
    assert error <= promises.contract.tolerance(dtype, T)


@pytest.mark.parametrize("chunk_size", [4, pytest.param(None, marks=pytest.mark.slow)])
def test_selective_scan_one_rate_per_channel_equals_rates_of_each_number(chunk_size):
  """`a` [D, 1] against the reference with [D, N]: documents, states and all gradients, float64."""
  T = 37
  rng = np.random.default_rng(0)
  segment_ids = np.cumsum(rng.random((B, T)) < 0.1, axis=1)
  with jax.enable_x64(True):
    inputs = in_float64(make_inputs(T))
    inputs["a"] = inputs["a"][:, :1]
    inputs["before"] = rng.normal(size=(B, D, N))
    weights = rng.normal(size=(B, T, D)), rng.normal(size=(B, D, N))

    def results(implementation, spread):
      def loss(inputs):
        inputs = inputs | {"a": spread(inputs["a"])}
        options = {"segment_ids": segment_ids, "implementation": implementation}
        options |= {"initial_state": SelectiveState(inputs["before"]), "chunk_size": chunk_size}
        out, state = call(inputs, **options)
        total = jnp.sum(out * weights[0]) + jnp.sum(state.h * weights[1])
        return total, (out, state.h)

      return jax.jit(jax.value_and_grad(loss, has_aux=True))(inputs)

    want = results("reference", lambda a: jnp.broadcast_to(a, (D, N)))
    for implementation in (None, "chunked", "associative", "reference"):
      got = results(implementation, lambda a: a)
      for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-10, atol=1e-12)


def test_selective_scan_one_rate_per_channel_runs_matrix_products():
  inputs = make_inputs(16)
  products = lambda a: str(jax.make_jaxpr(call)(inputs | {"a": a})).count("dot_general")
  assert products(inputs["a"][:, :1]) > 0 == products(inputs["a"])


@pytest.mark.parametrize("dt", [0.0, 1e4])
def test_selective_scan_zero_and_huge_step_sizes_are_exact(dt):
  """dt = 0 keeps the state bit for bit; dt a = -10000 leaves nothing but the token itself."""
  inputs = make_inputs(5)
  before = SelectiveState(jnp.ones((B, D, N)))
  inputs |= {"dt": jnp.full((B, 5, D), dt), "a": jnp.full((D, N), -1.0)}

  @jax.jit
  def run(inputs, before):
    loss = lambda inputs, before: (call(inputs, initial_state=before)[1].h[0, 0, 0], 0)
    gradients = jax.grad(loss, argnums=(0, 1), has_aux=True)(inputs, before)[0]
    return call(inputs, initial_state=before)[1], gradients

  state, gradients = run(inputs, before)
  if dt == 0:
    np.testing.assert_array_equal(state.h, before.h)
  else:
    close(state.h, dt * inputs["x"][:, -1, :, None] * inputs["b"][:, -1, None])
  assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(gradients))
  assert gradients[1].h[0, 0, 0] == (1 if dt == 0 else 0)


def test_selective_scan_float16_large_states_do_not_overflow():
  """States and products beyond float16's 65504, small outputs."""
  ones = jnp.ones((1, 40, 1), jnp.float16)
  out, state = selective_scan(300 * ones, 300 * ones, jnp.zeros((1, 1)), ones, 1e-6 * ones)
  assert state.h[0, 0, 0] == 40 * 300 * 300
  assert jnp.isfinite(out).all() and (out[:, -1] > 0).all()


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"x": (B, 6)}, r"x has shape \(2, 6\).*\[B, T, D\]"),
    ({"x": (B, 0, D), "dt": (B, 0, D), "b": (B, 0, N), "c": (B, 0, N)}, "T >= 1"),
    ({"dt": (B, 6, 1)}, r"dt has shape \(2, 6, 1\).*\[2, 6, 3\]"),
    ({"a": (N, D)}, r"a has shape \(4, 3\).*\[D\] of x, then N = \[3, any\]"),
    ({"a": (D, 2)}, r"b has shape \(2, 6, 4\).*then N of a = \[2, 6, 2\]"),
    ({"b": (B, 6, D)}, r"b has shape \(2, 6, 3\)"),
    ({"c": (B, 5, N)}, r"c has shape \(2, 5, 4\)"),
    ({"skip": (N,)}, r"skip has shape \(4,\)"),
    ({"x": jnp.zeros((B, 6, D), int)}, "x has dtype int32; it must be floating point"),
    ({"a": jnp.zeros((D, N), complex)}, "a has dtype complex64; it must be floating point"),
    ({"initial_state": SelectiveState(jnp.zeros((B, N, D)))}, r"initial_state.h has shape"),
    ({"chunk_size": 48}, "chunk_size=48 must be a power of two"),
    ({"dt_bias": (D,)}, r"dt_bias has shape \(3,\), but dt is used as it is; add dt_softplus=True"),
    ({"dt_bias": (N,), "dt_softplus": True}, r"dt_bias has shape \(4,\).*\[D\] of x"),
    ({"dt_bias": jnp.zeros(D, int), "dt_softplus": True}, "dt_bias has dtype int32"),
  ],
)
def test_selective_scan_bad_argument_raises_naming_it(change, message):
  arguments = {"x": (B, 6, D), "dt": (B, 6, D), "a": (D, N), "b": (B, 6, N), "c": (B, 6, N)}
  arguments = {n: jnp.zeros(x) if type(x) is tuple else x for n, x in (arguments | change).items()}
  with pytest.raises(ValueError, match=message):
    selective_scan(**arguments)
