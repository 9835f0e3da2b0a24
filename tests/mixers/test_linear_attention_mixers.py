"""GLA and RetNet: their options, how they start, and rejected arguments."""

import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import GLA, MIXERS
from tests.mixers.helpers import apply, float64_params, relative_error, split
from tests.mixers.references import linear_attention as reference
from tests.mixers.tiny import DIM, inputs


def test_gla_with_wide_keys_and_values_matches_the_equations():
  mixer = GLA(DIM, num_heads=2, expand_k=1, expand_v=2, rngs=nnx.Rngs(0))
  x = inputs(1, 9)
  want = reference.gla(float64_params(mixer), np.float64(x[0]), num_heads=2)
  assert (mixer.key_dim, mixer.value_dim) == (4, 8)
  assert relative_error(apply(mixer, x)[0][0], want) < 2e-6


@pytest.mark.parametrize(
  "name, options, outer_gain",
  [("gla", {}, 2**-2.5), ("retnet", {}, 1.0), ("retnet", {"output_gain": 0.5}, 0.5)],
)
def test_kernels_start_xavier_uniform(name, options, outer_gain):
  params = split(MIXERS[name](64, num_heads=4, **options, rngs=nnx.Rngs(0)))[1]
  for key in ("q_proj", "v_proj", "g_proj", "o_proj"):
    kernel = np.float64(params[key]["kernel"])
    gain = outer_gain if key == "o_proj" else 2**-2.5
    bound = gain * np.sqrt(6 / sum(kernel.shape))
    assert 0.98 * bound < np.abs(kernel).max() <= bound * 1.000001
