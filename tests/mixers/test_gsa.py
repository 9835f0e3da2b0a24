"""Gated slot attention: options, what bounds its output, size, bad options."""

import jax
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import GSA
from lnssm_jax.models import count_parameters
from tests.mixers.helpers import apply, float64_params, relative_error
from tests.mixers.references import gsa as reference
from tests.mixers.tiny import DIM, inputs


def test_gsa_options_match_reference_and_slots_are_means():
  """Slots start at 0 and move towards each key and value: they never pass the largest of them."""
  options = {"gate_logit_normalizer": 2.0, "scale": 0.5}
  mixer = GSA(DIM, num_heads=2, num_slots=5, **options, rngs=nnx.Rngs(0))
  x = 4 * inputs(1, 9)
  out, state = apply(mixer, x)
  want = reference.gsa(float64_params(mixer), np.float64(x[0]), num_heads=2, **options)
  assert relative_error(out[0], want) < 2e-6
  for slots, projection in ((state.keys, mixer.k_proj), (state.values, mixer.v_proj)):
    assert np.abs(slots.kv).max() <= np.abs(jax.nn.silu(projection(x))).max()


def test_parameter_count_matches_formula():
  D, H = 128, 2
  layer = jax.eval_shape(lambda: GSA(D, num_heads=H, rngs=nnx.Rngs(0)))
  assert count_parameters(layer) == 4 * D**2 + D * H * 64 + D


@pytest.mark.parametrize(
  "options, message",
  [
    ({"num_heads": 3}, "dim=8 is not a multiple of num_heads=3"),
    ({"num_heads": 2, "num_slots": 0}, "num_slots=0 must"),
    ({"num_heads": 2, "gate_logit_normalizer": 0}, "gate_logit_normalizer=0 must"),
  ],
)
def test_bad_options_raise_with_the_option_named(options, message):
  with pytest.raises(ValueError, match=message):
    GSA(8, **options, rngs=nnx.Rngs(0))
