"""S6 and SSD: size, how they start as published and as they were run, bad options."""

import jax
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import S6, SSD
from lnssm_jax.models import count_parameters
from tests.mixers.helpers import split


def test_parameter_counts_match_formulas():
  D, N, R = 64, 10, 4
  count = lambda cls, **k: count_parameters(
    jax.eval_shape(lambda: cls(D, state_dim=N, **k, rngs=nnx.Rngs(0)))
  )
  assert count(S6) == D * (R + 2 * N) + R * D + D + D * N + D + D**2
  assert count(S6, gate_rank=7) - count(S6) == 3 * 2 * D
  assert count(SSD) == D * (1 + 2 * N) + D + 1 + D + D**2


@pytest.mark.parametrize("cls", [S6, SSD])
def test_step_sizes_and_kernels_start_as_published_or_as_run(cls):
  D, L = 256, 8

  def start(initialization):
    layer = cls(D, initialization=initialization, num_layers=L, rngs=nnx.Rngs(0))
    params = split(layer)[1]
    bias = params["dt_proj"]["bias"] if cls is S6 else params["dt_bias"]
    kernels = [params[name]["kernel"] for name in ("x_proj", "o_proj")]
    rates = np.asarray(layer._rates())
    np.testing.assert_allclose(rates[0], np.arange(1, 65) if cls is S6 else [1], rtol=1e-6)
    return np.log1p(np.exp(np.float64(bias))), [np.std(kernel) for kernel in kernels]

  step, sizes = start("paper")
  assert step.min() >= 0.99e-3 and step.max() <= 0.101
  np.testing.assert_allclose(sizes, (3 * D) ** -0.5, rtol=0.05)
  step, sizes = start("as_run")
  np.testing.assert_allclose(step, np.log(2), rtol=1e-6)
  np.testing.assert_allclose(sizes, [0.02, 0.02 / (2 * L) ** 0.5], rtol=0.05)
