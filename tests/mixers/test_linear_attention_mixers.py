"""GLA and RetNet: their options, how they start, and rejected arguments."""

import jax
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import GLA, MIXERS, RetNet
from lnssm_jax.models import count_parameters
from tests.mixers.helpers import apply, float64_params, relative_error, split
from tests.mixers.references import linear_attention as reference
from tests.mixers.tiny import DIM, inputs


def test_gla_with_the_widths_of_longhorns_experiments():
  mixer = GLA(DIM, num_heads=2, expand_k=1, expand_v=2, rngs=nnx.Rngs(0))
  x = inputs(1, 9)
  want = reference.gla(float64_params(mixer), np.float64(x[0]), num_heads=2)
  assert (mixer.key_dim, mixer.value_dim) == (4, 8)
  assert relative_error(apply(mixer, x)[0][0], want) < 2e-6


@pytest.mark.parametrize("name, outer_gain", [("gla", 2**-2.5), ("retnet", 1.0)])
def test_kernels_start_xavier_uniform(name, outer_gain):
  params = split(MIXERS[name](64, num_heads=4, rngs=nnx.Rngs(0)))[1]
  for key in ("q_proj", "v_proj", "g_proj", "o_proj"):
    kernel = np.float64(params[key]["kernel"])
    gain = outer_gain if key == "o_proj" else 2**-2.5
    bound = gain * np.sqrt(6 / sum(kernel.shape))
    assert 0.98 * bound < np.abs(kernel).max() <= bound * 1.000001


def test_gla_parameter_count_matches_formula():
  """4 projections, the low-rank gate with its bias, the norm; K = D / 2 H."""
  D, H = 64, 4
  layer = jax.eval_shape(lambda: GLA(D, num_heads=H, rngs=nnx.Rngs(0)))
  gate = 16 * (D + D // 2) + D // 2
  assert count_parameters(layer) == 2 * D * D // 2 + 3 * D * D + gate + D // H


@pytest.mark.parametrize(
  "make, message",
  [
    (lambda **k: GLA(6, num_heads=2, **k), r"expand_k=0.5 of dim=6 gives 3.0 channels"),
    (lambda **k: GLA(8, num_heads=2, expand_v=0.3, **k), "expand_v=0.3 of dim=8"),
    (lambda **k: GLA(8, num_heads=2, gate_logit_normalizer=0, **k), "gate_logit_normalizer=0 must"),
    (lambda **k: GLA(8, num_heads=2, gate_rank=0, **k), "gate_rank=0 must"),
    (lambda **k: RetNet(6, num_heads=2, **k), "keys of odd width 3"),
    (lambda **k: RetNet(8, num_heads=3, **k), "dim=8 is not a multiple of num_heads=3"),
  ],
)
def test_bad_options_raise_with_the_option_named(make, message):
  with pytest.raises(ValueError, match=message):
    make(rngs=nnx.Rngs(0))
