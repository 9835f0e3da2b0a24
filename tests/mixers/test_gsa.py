"""Gated slot attention: options, what bounds its output, size, bad options."""

import jax
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import GSA
from lnssm_jax.models import count_parameters
from tests.mixers import plain_gsa
from tests.mixers.plain_lnssm import apply, float64_params, relative_error
from tests.mixers.tiny import DIM, inputs


def test_options_and_that_slots_hold_means():
  """Slots start at 0 and move towards each key and value: they never pass the largest of them."""
  options = {"gate_temperature": 2.0, "scale": 0.5}
  mixer = GSA(DIM, num_heads=2, num_slots=5, **options, rngs=nnx.Rngs(0))
  x = 4 * inputs(1, 9)
  out, state = apply(mixer, x)
  want = plain_gsa.gsa(float64_params(mixer), np.float64(x[0]), num_heads=2, **options)
  assert relative_error(out[0], want) < 2e-6
  for slots, projection in ((state.keys, mixer.k_proj), (state.values, mixer.v_proj)):
    assert np.abs(slots.kv).max() <= np.abs(jax.nn.silu(projection(x))).max()


def test_parameters_are_counted_by_a_formula():
  D, H = 128, 2
  layer = jax.eval_shape(lambda: GSA(D, num_heads=H, rngs=nnx.Rngs(0)))
  assert count_parameters(layer) == 4 * D**2 + D * H * 64 + D


@pytest.mark.parametrize(
  "options, message",
  [
    ({"num_heads": 3}, "dim=8 is not a multiple of num_heads=3"),
    ({"num_heads": 2, "num_slots": 0}, "num_slots=0 must"),
    ({"num_heads": 2, "gate_temperature": 0}, "gate_temperature=0 must"),
  ],
)
def test_bad_options_are_named(options, message):
  with pytest.raises(ValueError, match=message):
    GSA(8, **options, rngs=nnx.Rngs(0))
