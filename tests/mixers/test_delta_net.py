"""DeltaNet and Gated DeltaNet: what the memory does, sizes, initial values, bad options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import DeltaNet, GatedDeltaNet
from lnssm_jax.models import count_parameters
from tests.mixers.helpers import apply, split
from tests.mixers.tiny import DIM, inputs


def test_delta_net_state_stays_bounded():
  """Unit keys and rates below 1 never make the memory longer than sqrt(T) times a value."""
  mixer = DeltaNet(DIM, num_heads=1, rngs=nnx.Rngs(0))
  token = inputs(1, 1)
  _, state = apply(mixer, jnp.tile(token, (1, 200, 1)))
  _, before = apply(mixer, jnp.tile(token, (1, 100, 1)))
  np.testing.assert_allclose(state.recurrent.kv, before.recurrent.kv, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("mixer, expand_v", [(DeltaNet, 1), (GatedDeltaNet, 2)])
def test_parameter_count_matches_formula(mixer, expand_v):
  D, H, V = 64, 4, expand_v * 64
  layer = jax.eval_shape(lambda: mixer(D, num_heads=H, rngs=nnx.Rngs(0)))
  shared = 2 * D * D + 2 * D * V + D * H + 4 * (2 * D + V) + V // H
  gates = 0 if mixer is DeltaNet else D * H + D * V + 2 * H
  assert count_parameters(layer) == shared + gates


def test_gated_delta_net_initial_decays_match_paper():
  params = split(GatedDeltaNet(512, num_heads=256, rngs=nnx.Rngs(0)))[1]
  rate = np.exp(np.float64(params["log_rate"]))
  assert rate.min() < 1 and 15 < rate.max() <= 16.001
  step = np.log1p(np.exp(np.float64(params["a_proj"]["bias"])))
  assert step.min() >= 0.999e-3 and step.max() <= 0.1001


def test_gated_delta_net_head_dim_is_independent_of_dim():
  mixer = GatedDeltaNet(DIM, num_heads=3, head_dim=2, expand_v=3, rngs=nnx.Rngs(0))
  assert mixer.init_state(1).recurrent.kv.shape == (1, 3, 2, 6)
  assert jax.eval_shape(apply, mixer, inputs(1, 4))[0].shape == (1, 4, DIM)


@pytest.mark.parametrize(
  "mixer, options, message",
  [
    (DeltaNet, {"num_heads": 3}, "dim=8 is not a multiple of num_heads=3"),
    (GatedDeltaNet, {"num_heads": 3}, "dim=8 is not a multiple of num_heads=3"),
    (GatedDeltaNet, {"num_heads": 2, "head_dim": 0}, "head_dim=0 must"),
    (GatedDeltaNet, {"num_heads": 2, "expand_v": 0}, "expand_v=0 must"),
    (DeltaNet, {"num_heads": 2, "conv_size": 0}, "conv_size=0 must"),
  ],
)
def test_bad_options_raise_with_the_option_named(mixer, options, message):
  with pytest.raises(ValueError, match=message):
    mixer(DIM, **options, rngs=nnx.Rngs(0))
