"""HGRN2, HGRN, LRN: lower bounds, gates at their extremes, options, sizes, bad options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import HGRN, HGRN2, LRN
from tests.mixers.helpers import apply, float64_params, relative_error, split
from tests.mixers.references import hgrn as reference
from tests.mixers.tiny import DIM, inputs


def make(**options):
  return HGRN2(DIM, num_heads=2, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize("layer", range(4))
def test_lower_bounds_rise_with_depth(layer):
  """Equal Gamma make P = 1 / L, and the sum over the layers below layer / L."""
  mixer = make(layer=layer, num_layers=4)
  _, k = mixer._gates(jnp.full(DIM, -100.0))  # the gate itself lets everything go
  np.testing.assert_allclose(1 - k, np.full(DIM, layer / 4), atol=1e-6)


@pytest.mark.slow
def test_hgrn2_first_layer_bound_stays_zero():
  gates = lambda mixer: sum(jnp.sum(z) for z in mixer._gates(inputs(1, 5)))
  gradient = jax.grad(gates)(make(layer=0, num_layers=4))
  np.testing.assert_array_equal(gradient.bound[...], np.zeros(DIM))
  assert np.all(jax.grad(gates)(make(layer=1, num_layers=4)).bound[...] != 0)


@pytest.mark.parametrize("layer", [0, 2])
def test_gates_are_exact_at_their_extremes(layer):
  mixer = make(layer=layer, num_layers=4)
  f = np.array([-60.0, -20.0, -3.0, -0.1, 0.0, 0.3, 2.0, 9.0, 20.0, 60.0])
  log_decay, k = mixer._gates(jnp.float32(f)[:, None])
  gamma = -np.expm1(-(np.float64(mixer.bound[...]) ** 2))
  forgotten = (1 - gamma) / (1 + np.exp(f)[:, None])
  near_one = np.log1p(-np.minimum(forgotten, 0.5))
  quotient = np.log(gamma + np.exp(f)[:, None]) - np.log1p(np.exp(f))[:, None]
  want = np.where(forgotten < 0.5, near_one, quotient)
  np.testing.assert_allclose(k, forgotten, rtol=1e-5)
  np.testing.assert_allclose(log_decay, want, rtol=1e-5)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("f", [-1e4, -90.0, 0.0, 90.0, 1e4])
def test_gates_have_finite_gradients(layer, f):
  mixer = make(layer=layer, num_layers=4)
  loss = lambda mixer, f: sum(jnp.sum(z) for z in mixer._gates(f))
  gradients = jax.grad(loss, argnums=(0, 1))(mixer, jnp.full(DIM, f))
  for leaf in jax.tree.leaves(gradients):
    assert np.isfinite(leaf).all()


def test_hgrn2_without_lower_bound_matches_reference():
  mixer, x = make(layer=2, num_layers=4, lower_bound="none"), inputs(1, 9)
  params = float64_params(mixer)
  assert params.get("bound") is None
  want = reference.hgrn2({k: p for k, p in params.items() if k != "bound"}, x[0], num_heads=2)
  assert relative_error(apply(mixer, x)[0][0], want) < 2e-6


def test_initial_matrices():
  params = split(HGRN2(64, num_heads=2, rngs=nnx.Rngs(0)))[1]
  for value in (params["q_proj"]["kernel"], params["f_proj"]["bias"], params["o_proj"]["kernel"]):
    assert 0.85 / 8 < np.abs(value).max() <= 1 / 8


def test_hgrn_starts_as_published():
  params = split(HGRN(64, layer=2, num_layers=4, rngs=nnx.Rngs(0)))[1]
  np.testing.assert_allclose(params["theta"], 1e4 ** (-2 * np.arange(64) / 64), rtol=1e-5)
  np.testing.assert_allclose(-np.expm1(-(params["bound"] ** 2)), np.full(64, 0.5), rtol=1e-6)
  assert 0.85 / 8 < np.abs(params["c_proj"]["kernel"]).max() <= 1 / 8
  assert 0.85 / 8 < np.abs(params["o_proj"]["kernel"]).max() * 2**0.5 <= 1 / 8


def test_hgrn_without_lower_bound_matches_reference():
  mixer, x = HGRN(DIM, layer=2, num_layers=4, lower_bound="none", rngs=nnx.Rngs(0)), inputs(1, 9)
  params = {k: p for k, p in float64_params(mixer).items() if k != "bound"}
  assert relative_error(apply(mixer, x)[0][0], reference.hgrn(params, x[0])) < 2e-6


def test_lrn_with_other_options_matches_reference():
  mixer, x = LRN(DIM, activation="none", output_gate="none", rngs=nnx.Rngs(0)), inputs(1, 9)
  params = {k: p for k, p in float64_params(mixer).items() if not k.startswith("g_")}
  want = reference.lrn(params, np.float64(x[0]), activation=lambda x: x)
  assert relative_error(apply(mixer, x)[0][0], want) < 2e-6
