"""Mamba, Mamba-2 and Longhorn: their sizes in the papers' models, and how they start."""

import jax
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import Longhorn, LonghornExact, Mamba, Mamba2
from lnssm_jax.models import count_parameters
from tests.mixers.helpers import split


@pytest.mark.parametrize(
  "mixer, num_layers, dim, parameters",
  [
    (Mamba, 24, 768, 129_153_792),  # 129.15M
    (Mamba, 48, 1024, 371_540_992),  # 371.54M
    (Longhorn, 24, 768, 128_563_968),  # 128.56M
    (LonghornExact, 24, 768, 128_563_968),
    (Longhorn, 48, 1024, 369_968_128),  # 369.97M
  ],
)
def test_paper_models_have_the_printed_sizes(mixer, num_layers, dim, parameters):
  """Layers of an RMSNorm and a mixer, a last norm, and an embedding of 50,304 that is the head."""
  layer = count_parameters(jax.eval_shape(lambda: mixer(dim, rngs=nnx.Rngs(0))))
  assert num_layers * (layer + dim) + dim + 50_304 * dim == parameters


@pytest.mark.parametrize("mixer", [Mamba, Mamba2])
def test_step_sizes_are_log_uniform(mixer):
  params = split(mixer(512, **({"head_dim": 2} if mixer is Mamba2 else {}), rngs=nnx.Rngs(0)))[1]
  bias = params["dt_bias"] if mixer is Mamba2 else params["dt_proj"]["bias"]
  step = np.log1p(np.exp(np.float64(bias)))
  assert step.min() >= 0.999e-3 and step.max() <= 0.1001
  quartiles = np.quantile(np.log10(step), [0.25, 0.5, 0.75])
  np.testing.assert_allclose(quartiles, [-2.5, -2, -1.5], atol=0.15)


def test_mamba_starts_as_published():
  params = split(Mamba(32, num_layers=4, rngs=nnx.Rngs(0)))[1]
  np.testing.assert_allclose(np.exp(params["a_log"]), np.tile(np.arange(1, 17), (64, 1)), rtol=1e-6)
  np.testing.assert_array_equal(params["skip"], np.ones(64))
  for kernel, bound in (
    (params["in_proj"]["kernel"], 32**-0.5),
    (params["conv"]["kernel"], 0.5),
    (params["conv"]["bias"], 0.5),
    (params["dt_proj"]["kernel"], 2**-0.5),
    (params["o_proj"]["kernel"], 64**-0.5 / 2),
  ):
    largest = np.abs(kernel).max()
    assert 0.85 * bound < largest <= bound


def test_mamba2_starts_as_published():
  params = split(Mamba2(64, head_dim=2, rngs=nnx.Rngs(0)))[1]
  rate = np.exp(params["log_rate"])
  assert 1 <= rate.min() < 4 and 13 < rate.max() <= 16
  np.testing.assert_array_equal(params["norm"]["scale"], np.ones(128))


def test_longhorn_initial_rate_bias_is_zero():
  params = split(Longhorn(32, rngs=nnx.Rngs(0)))[1]
  np.testing.assert_array_equal(params["beta_proj"]["bias"], np.zeros(64))
  np.testing.assert_array_equal(params["skip"], np.ones(64))
