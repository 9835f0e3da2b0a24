"""RG-LRU: how it starts, its first token, the derivative near a decay of 1, bad options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import RGLRU
from lnssm_jax.mixers.griffin import _bounded_sqrt
from tests.mixers.helpers import apply, split
from tests.mixers.tiny import DIM, inputs


@pytest.mark.slow
def test_rg_lru_initial_decays_match_paper():
  params = split(RGLRU(512, num_heads=256, rngs=nnx.Rngs(0)))[1]
  radius = np.exp(-np.logaddexp(0, np.float64(params["decay_rate"])))
  assert radius.min() >= 0.8999 and radius.max() <= 0.9991
  np.testing.assert_allclose(np.mean(radius**2), (0.9**2 + 0.999**2) / 2, atol=0.01)


@pytest.mark.slow
def test_kernels_start_as_published():
  params = split(RGLRU(64, num_heads=2, rngs=nnx.Rngs(0)))[1]
  for kernel, deviation in (
    (params["x_proj"]["kernel"], 64**-0.5),
    (params["o_proj"]["kernel"], 64**-0.5),
    (params["input_gate"]["kernel"], 32**-0.5),
    (params["conv"]["kernel"], (0.01 / 4) ** 0.5),
  ):
    np.testing.assert_allclose(np.std(kernel), deviation, rtol=0.15)
  np.testing.assert_array_equal(params["conv"]["bias"], np.zeros(64))
  np.testing.assert_array_equal(params["decay_gate"]["bias"], np.zeros(64))


def test_rg_lru_second_segment_equals_a_new_sequence():
  """Its first token meets the factor 1, not sqrt(1 - a^2)."""
  mixer, x = RGLRU(DIM, num_heads=2, rngs=nnx.Rngs(0)), inputs(1, 4)
  packed, _ = apply(mixer, x, None, jnp.array([[0, 0, 1, 1]]))
  alone, _ = apply(mixer, x[:, 2:])
  np.testing.assert_allclose(packed[:, 2:], alone, rtol=1e-6, atol=1e-8)
  assert not np.allclose(apply(mixer, x)[0][:, 2:], alone, rtol=1e-2)


@pytest.mark.parametrize("x, slope", [(0.25, 1.0), (1e-6, 500.0), (1e-9, 1000.0), (0.0, 1000.0)])
def test_rg_lru_square_root_has_a_bounded_derivative(x, slope):
  value, derivative = jax.value_and_grad(_bounded_sqrt)(x)
  np.testing.assert_allclose([value, derivative], [np.sqrt(x), slope], rtol=1e-5)
