"""Gated slot attention: options, what bounds its output, size, bad options."""

import jax
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import GSA
from tests.mixers.helpers import apply, float64_params, relative_error
from tests.mixers.references import gsa as reference
from tests.mixers.tiny import DIM, inputs


@pytest.mark.slow
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
