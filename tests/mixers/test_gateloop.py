"""GateLoop: long sums of angles, heads of width 1, size, bad options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import GateLoop
from lnssm_jax.mixers.common.angles import sums_within_a_turn
from tests.mixers.helpers import apply, float64_params, relative_error, split
from tests.mixers.references import gateloop as reference
from tests.mixers.tiny import DIM, inputs


@pytest.mark.parametrize("size", [0.1, 3.0, 300.0])
def test_gateloop_angle_sums_lose_less_than_a_rounding_per_token(size):
  angles = jnp.asarray(np.random.default_rng(0).normal(1, size, (1, 4096, 1)), jnp.float32)
  sums = jax.jit(sums_within_a_turn)(angles)
  assert np.abs(sums).max() < 3.2
  exact = np.cumsum(np.float64(angles), axis=1)
  assert np.abs(np.exp(1j * np.float64(sums)) - np.exp(1j * exact)).max() < 4096 * 2**-24


@pytest.mark.slow
def test_gateloop_heads_of_width_one_match_reference():
  mixer, x = GateLoop(DIM, num_heads=DIM, rngs=nnx.Rngs(0)), inputs(1, 9)
  want = reference.gateloop(float64_params(mixer), np.float64(x[0]), num_heads=DIM)
  assert relative_error(apply(mixer, x)[0][0], want) < 2e-6


def test_initial_values():
  params = split(GateLoop(64, num_heads=2, rngs=nnx.Rngs(0)))[1]
  for name in "qkvapgo":
    assert 0.85 / 8 < np.abs(params[f"{name}_proj"]["kernel"]).max() <= 1 / 8
  np.testing.assert_array_equal(params["a_proj"]["bias"], np.zeros(64))
  np.testing.assert_array_equal(params["norm"]["scale"], np.ones(64))
