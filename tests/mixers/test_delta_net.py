"""DeltaNet and Gated DeltaNet: what the memory does, sizes, initial values, bad options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import DeltaNet, GatedDeltaNet
from lnssm_jax.models import count_parameters
from tests.mixers.plain_lnssm import apply, split
from tests.mixers.tiny import DIM, inputs


def test_a_memory_that_corrects_itself_stays_bounded():
  """Unit keys and rates below 1 never make the memory longer than sqrt(T) times a value."""
  mixer = DeltaNet(DIM, num_heads=1, rngs=nnx.Rngs(0))
  token = inputs(1, 1)
  _, state = apply(mixer, jnp.tile(token, (1, 200, 1)))
  _, before = apply(mixer, jnp.tile(token, (1, 100, 1)))
  np.testing.assert_allclose(state.memory.kv, before.memory.kv, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("mixer, expand_v", [(DeltaNet, 1), (GatedDeltaNet, 2)])
def test_parameters_are_counted_by_a_formula(mixer, expand_v):
  D, H, V = 64, 4, expand_v * 64
  layer = jax.eval_shape(lambda: mixer(D, num_heads=H, rngs=nnx.Rngs(0)))
  shared = 2 * D * D + 2 * D * V + D * H + 4 * (2 * D + V) + V // H
  gates = 0 if mixer is DeltaNet else D * H + D * V + 2 * H
  assert count_parameters(layer) == shared + gates


def test_decays_of_the_gated_one_start_as_published():
  params = split(GatedDeltaNet(512, num_heads=256, rngs=nnx.Rngs(0)))[1]
  rate = np.exp(np.float64(params["log_rate"]))
  assert rate.min() < 1 and 15 < rate.max() <= 16.001
  step = np.log1p(np.exp(np.float64(params["dt_bias"])))
  assert step.min() >= 0.999e-3 and step.max() <= 0.1001


def test_heads_of_a_width_of_their_own():
  mixer = GatedDeltaNet(DIM, num_heads=3, head_dim=2, expand_v=3, rngs=nnx.Rngs(0))
  assert mixer.init_state(1).memory.kv.shape == (1, 3, 2, 6)
  assert jax.eval_shape(apply, mixer, inputs(1, 4))[0].shape == (1, 4, DIM)


@pytest.mark.parametrize(
  "mixer, options, message",
  [
    (DeltaNet, {"num_heads": 3}, "dim=8 is not a multiple of num_heads=3"),
    (GatedDeltaNet, {"num_heads": 3}, "dim=8 is not a multiple of num_heads=3"),
    (GatedDeltaNet, {"num_heads": 2, "head_dim": 0}, "head_dim=0 must"),
    (GatedDeltaNet, {"num_heads": 2, "expand_v": 0}, "expand_v=0 must"),
    (DeltaNet, {"num_heads": 2, "conv_width": 0}, "width=0 must"),
  ],
)
def test_bad_options_are_named(mixer, options, message):
  with pytest.raises(ValueError, match=message):
    mixer(DIM, **options, rngs=nnx.Rngs(0))
