"""Gated fast weights: options, how they start, size, bad options."""

import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import GFW
from tests.mixers.helpers import apply, float64_params, relative_error
from tests.mixers.references import gfw as reference
from tests.mixers.tiny import DIM, inputs


@pytest.mark.slow
def test_gfw_head_dim_and_normalizer_match_reference():
  mixer = GFW(DIM, num_heads=2, head_dim=3, gate_logit_normalizer=2.0, rngs=nnx.Rngs(0))
  x = 9 * inputs(1, 9)
  want = reference.gfw(
    float64_params(mixer), np.float64(x[0]), num_heads=2, gate_logit_normalizer=2
  )
  assert relative_error(apply(mixer, x)[0][0], want) < 2e-6
  assert mixer.init_state(3).kv.shape == (3, 2, 3, 4)
