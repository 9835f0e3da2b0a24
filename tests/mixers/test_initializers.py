"""Initial values, against numbers worked out by hand from the formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import LNSSM
from lnssm_jax.mixers.common.initializers import orthogonal
from tests.mixers.helpers import split


def initial(layer, num_layers=6, dim=8):
  return split(LNSSM(dim, num_heads=2, layer=layer, num_layers=num_layers, rngs=nnx.Rngs(0)))[1]


def test_decays_span_the_published_range():
  decay = np.exp(-np.exp(np.float64(initial(0)["w"])))
  np.testing.assert_allclose(decay[[0, -1]], [0.9932847, 1.8922e-09], rtol=1e-4)
  assert (np.diff(decay) < 0).all()


@pytest.mark.parametrize(
  "layer, channel, value",
  [
    (0, 0, -5.0),
    (0, 7, 3.0),
    (0, 3, -5 + 8 * (3 / 7) ** 0.7),  # r = 0
    (5, 3, -5 + 8 * (3 / 7) ** 2.0),  # r = 1
    (2, 6, -5 + 8 * (6 / 7) ** 1.22),  # r = 2/5
  ],
)
def test_decay_parameter(layer, channel, value):
  np.testing.assert_allclose(initial(layer)["w"][channel], value, rtol=1e-6)


@pytest.mark.parametrize(
  "layer, name, channel, value",
  [
    (0, "mu_q", 6, 0.75),  # rho = 1
    (0, "mu_k", 0, 0.0),
    (0, "mu_v", 2, 0.25),  # r = 0
    (0, "mu_g", 2, 0.5),  # power rho / 2
    (3, "mu_q", 2, 0.5),  # rho = 1/2
    (3, "mu_k", 2, 0.5),
    (3, "mu_v", 2, 0.5 + 0.3 * 3 / 5),  # r = 3/5
    (3, "mu_g", 4, 0.5**0.25),
    (5, "mu_v", 4, 0.5 ** (1 / 6) + 0.3),  # rho = 1/6, r = 1
    (5, "gamma", 4, 1.0),
  ],
)
def test_shifts(layer, name, channel, value):
  np.testing.assert_allclose(initial(layer)[name][channel], value, rtol=1e-6)


def test_a_single_layer_is_a_first_layer():
  for name in ("w", "mu_v"):
    np.testing.assert_array_equal(initial(0, num_layers=1)[name], initial(0, num_layers=6)[name])


def test_matrices():
  params = initial(0)
  for name in "qkgo":
    np.testing.assert_array_equal(params[f"{name}_proj"]["kernel"], np.zeros((8, 8)))
  value = np.float64(params["v_proj"]["kernel"])
  np.testing.assert_allclose(value @ value.T, np.eye(8), atol=1e-6)


@pytest.mark.slow
def test_a_traced_layer_gives_the_same_values():
  make = lambda layer: LNSSM(8, num_heads=2, layer=layer, num_layers=6, rngs=nnx.Rngs(0))
  stacked = jax.vmap(make)(jnp.arange(6))
  for name in ("w", "mu_q", "mu_v", "mu_g"):
    want = np.stack([initial(layer)[name] for layer in range(6)])
    np.testing.assert_allclose(getattr(stacked, name)[...], want, rtol=1e-6)


@pytest.mark.parametrize("shape", [(6, 6), (12, 8), (8, 12), (100, 8), (8, 100)])
def test_orthogonal(shape):
  """Square, nearly square (by QR) and tall (by Cholesky), in both directions."""
  kernel = np.float64(orthogonal(3.0)(jax.random.key(0), shape))
  assert kernel.shape == shape
  gram = kernel.T @ kernel if shape[0] > shape[1] else kernel @ kernel.T
  np.testing.assert_allclose(gram, 9 * np.eye(min(shape)), atol=1e-5)


def test_orthogonal_by_qr_and_by_cholesky_agree():
  """Q of A = Q R is unique once R's diagonal is positive."""
  normal = np.float64(jax.random.normal(jax.random.key(0), (100, 8)))
  q, r = np.linalg.qr(normal)
  kernel = orthogonal(1.0)(jax.random.key(0), (100, 8))
  np.testing.assert_allclose(kernel, q * np.sign(np.diag(r)), atol=1e-6)


def test_orthogonal_in_a_small_dtype():
  kernel = orthogonal(1.0)(jax.random.key(0), (40, 4), jnp.bfloat16)
  assert kernel.dtype == jnp.bfloat16
  want = orthogonal(1.0)(jax.random.key(0), (40, 4))
  np.testing.assert_array_equal(kernel, want.astype(jnp.bfloat16))
