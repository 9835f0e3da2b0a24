"""DeltaNet and Gated DeltaNet: what the memory does, sizes, initial values, bad options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import DeltaNet, GatedDeltaNet
from tests.mixers.helpers import apply, split
from tests.mixers.tiny import DIM, inputs


@pytest.mark.slow
def test_delta_net_state_stays_bounded():
  """Unit keys and rates below 1 never make the memory longer than sqrt(T) times a value."""
  mixer = DeltaNet(DIM, num_heads=1, rngs=nnx.Rngs(0))
  token = inputs(1, 1)
  _, state = apply(mixer, jnp.tile(token, (1, 200, 1)))
  _, before = apply(mixer, jnp.tile(token, (1, 100, 1)))
  np.testing.assert_allclose(state.recurrent.kv, before.recurrent.kv, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_gated_delta_net_initial_decays_match_paper():
  params = split(GatedDeltaNet(512, num_heads=256, rngs=nnx.Rngs(0)))[1]
  rate = np.exp(np.float64(params["log_rate"]))
  assert rate.min() < 1 and 15 < rate.max() <= 16.001
  step = np.log1p(np.exp(np.float64(params["a_proj"]["bias"])))
  assert step.min() >= 0.999e-3 and step.max() <= 0.1001


@pytest.mark.slow
def test_gated_delta_net_head_dim_is_independent_of_dim():
  mixer = GatedDeltaNet(DIM, num_heads=3, head_dim=2, expand_v=3, rngs=nnx.Rngs(0))
  assert mixer.init_state(1).recurrent.kv.shape == (1, 3, 2, 6)
  assert jax.eval_shape(apply, mixer, inputs(1, 4))[0].shape == (1, 4, DIM)
