"""The dynamical-systems framework: our layers as systems, in float64; its lemmas and eq. 22."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.frameworks import dsf
from lnssm_jax.mixers import MIXERS, kernel_attention, s6
from tests.mixers import plain_ops
from tests.mixers.helpers import relative_error, split

T, D = 5, 4
LAYERS = (
  ("linear_attention", {"num_heads": 2, "head_dim": 3, "use_bias": False}),
  ("linear_attention", {"num_heads": 1, "feature_map": "identity", "use_bias": False}),
  ("normalized_attention", {"num_heads": 2, "head_dim": 3, "use_bias": False}),
  ("normalized_attention", {"num_heads": 1, "eta": "softplus", "use_bias": False}),
  ("s6", {"state_dim": 3, "gate_rank": 2}),
  ("ssd", {"state_dim": 3}),
)


def layer(name, options):
  """A layer with random parameters, float64."""
  dtypes = {"dtype": jnp.float64, "param_dtype": jnp.float64}
  build = lambda: MIXERS[name](D, **options, **dtypes, rngs=nnx.Rngs(0))
  graph, params = split(jax.eval_shape(build))
  random = np.random.default_rng(0)
  return nnx.merge(graph, jax.tree.map(lambda p: 0.5 * random.normal(size=p.shape), params))


def inputs(*shape):
  return np.random.default_rng(1).normal(size=shape)


def phi_times(system, u):
  return np.einsum("ijab,jb->ia", dsf.kernel(system), u)


@pytest.mark.parametrize(("name", "options"), LAYERS)
def test_layer_equals_its_system_and_its_kernel(name, options):
  """The layers on ops in NumPy, which tests/ops has equal to ours."""
  x = inputs(T, D)
  with jax.enable_x64():
    mixer = layer(name, options)
    with plain_ops.in_place_of(kernel_attention, s6):
      want = mixer(jnp.asarray(x)[None])[0][0]
    system = dsf.system_of(mixer, x)
    assert relative_error(dsf.apply(system, jnp.asarray(x)), want) < 1e-13
    assert relative_error(phi_times(system, x), want) < 1e-13


@pytest.mark.slow
def test_softmax_attention_is_the_limit_of_taylor_features():
  """Lemma 1, with the error that it promises."""
  u, q, k = inputs(T, D), inputs(T, 1, 2), 0.7 * inputs(T, 1, 2)[::-1]
  s = q[:, 0] @ k[:, 0].T
  weights = np.exp(s) * np.tri(T)
  want = weights @ u / weights.sum(1, keepdims=True)
  errors = []
  with jax.enable_x64():
    for order in (2, 6, 12):
      a, b = jax.jit(lambda q, k, order=order: [dsf.taylor_features(x, order) for x in (q, k)])(
        q, k
      )
      bound = np.abs(s) ** (order + 1) * np.exp(np.abs(s)) / math.factorial(order + 1)
      assert (np.abs(a[:, 0] @ b[:, 0].T - np.exp(s)) <= bound + 1e-13).all()
      eta = np.sum(a * np.cumsum(b, axis=0), axis=-1)
      system = dsf.attention(a, b, eta, np.eye(D))
      errors.append(relative_error(dsf.apply(system, u), want))
  assert errors[0] > 1e-3 and errors[1] < 0.1 * errors[0] and errors[2] < 1e-6


def test_enlarged_system_has_the_same_outputs():
  """Lemma 2."""
  u = inputs(T, D)
  with jax.enable_x64():
    small, other = (dsf.system_of(layer(*LAYERS[i]), u) for i in (5, 0))
    large = dsf.enlarge(small, other)
    assert large.transition.shape[1] == small.transition.shape[1] + other.transition.shape[1]
    want = dsf.apply(small, jnp.asarray(u))
    np.testing.assert_allclose(dsf.apply(large, jnp.asarray(u)), want, rtol=1e-12)


def test_decay_of_s6_is_a_power_of_a_forget_gate():
  """Eq. 22: exp(-A softplus(z)) = sigmoid(-z)^A."""
  z, A, b = inputs(7, 1), np.abs(inputs(1, 2)) + 0.1, inputs(7, 2)
  with jax.enable_x64():
    got = dsf.forget_gate(z, A)
    system = dsf.selective(jax.nn.softplus(z), A, b, b, A[:, 0])
  np.testing.assert_allclose(got, (1 / (1 + np.exp(z)))[..., None] ** A, rtol=1e-13)
  np.testing.assert_allclose(system.transition, got[:, 0], rtol=1e-13)


def test_gradients_of_the_forget_gate_and_its_smallest_values():
  z, A, weights = inputs(7, 1), np.abs(inputs(1, 2)) + 0.1, inputs(7, 1, 2)
  with jax.enable_x64():
    d_z, d_A = jax.grad(lambda *x: jnp.sum(weights * dsf.forget_gate(*x)), (0, 1))(z, A)
  gate = 1 / (1 + np.exp(z[..., None]))
  power = weights * gate**A
  np.testing.assert_allclose(d_z, -np.sum(A * power * (1 - gate), axis=-1), rtol=1e-12)
  np.testing.assert_allclose(d_A, np.sum(power * np.log(gate), axis=0), rtol=1e-12)
  # sigmoid(-100) is 0 in float32, its square root not.
  small = dsf.forget_gate(jnp.full((1, 1), 100.0), jnp.full((1, 1), 0.5))
  np.testing.assert_allclose(small, np.exp(-50.0), rtol=1e-5)


@pytest.mark.slow
def test_what_is_not_a_system_raises():
  x = inputs(T, D)
  with pytest.raises(ValueError, match=r"mixer is a GLA; .*: LinearAttention, .*systems\("):
    dsf.system_of(MIXERS["gla"](D, num_heads=1, rngs=nnx.Rngs(0)), x)
  with pytest.raises(ValueError, match=r"mixer.v_proj has a bias; .* use_bias=False"):
    dsf.system_of(MIXERS["linear_attention"](D, num_heads=1, rngs=nnx.Rngs(0)), x)
  q = jnp.ones((T, 3, 2))
  with pytest.raises(ValueError, match="d=4 rows, which H=3 heads"):
    dsf.attention(q, q, q[..., 0], jnp.eye(4))
  with pytest.raises(ValueError, match=r"eta has shape \(5, 2\)"):
    dsf.attention(q, q, q[:, 0], jnp.eye(4))
  with pytest.raises(ValueError, match="order=-1"):
    dsf.taylor_features(x, -1)
