"""Gated fast weights: options, how they start, size, bad options."""

import jax
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import GFW
from lnssm_jax.models import count_parameters
from tests.mixers.helpers import apply, float64_params, relative_error
from tests.mixers.references import gfw as reference
from tests.mixers.tiny import DIM, inputs


def test_gfw_head_dim_and_normalizer_match_reference():
  mixer = GFW(DIM, num_heads=2, head_dim=3, gate_logit_normalizer=2.0, rngs=nnx.Rngs(0))
  x = 9 * inputs(1, 9)
  want = reference.gfw(
    float64_params(mixer), np.float64(x[0]), num_heads=2, gate_logit_normalizer=2
  )
  assert relative_error(apply(mixer, x)[0][0], want) < 2e-6
  assert mixer.init_state(3).kv.shape == (3, 2, 3, 4)


def test_parameter_count_matches_formula():
  D, H, K = 64, 4, 10
  count = lambda **k: count_parameters(
    jax.eval_shape(lambda: GFW(D, num_heads=H, rngs=nnx.Rngs(0), **k))
  )
  assert count() == 6 * D**2 + 2 * D
  assert count(head_dim=K) == 3 * D * H * K + 3 * D**2 + 2 * D


@pytest.mark.parametrize(
  "options, message",
  [
    ({"num_heads": 3}, "dim=8 is not a multiple of num_heads=3"),
    ({"num_heads": 2, "gate_logit_normalizer": -1}, "gate_logit_normalizer=-1 must"),
    ({"num_heads": 2, "head_dim": 0}, "head_dim=0 must"),
  ],
)
def test_bad_options_raise_with_the_option_named(options, message):
  with pytest.raises(ValueError, match=message):
    GFW(8, **options, rngs=nnx.Rngs(0))
