"""MetaLA: its own-token term at the start, size, bad options."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from lnssm_jax.mixers import MetaLA
from tests.mixers.helpers import apply, float64_params, relative_error, split
from tests.mixers.references import metala as reference
from tests.mixers.tiny import inputs


def test_initial_values():
  params = split(MetaLA(64, num_heads=4, rngs=nnx.Rngs(0)))[1]
  assert not np.any(params["own_gain"])
  assert not np.any(params["g_proj"]["bias"])
  bound = 2**-2.5 * np.sqrt(6 / (64 + 32))
  assert 0.98 * bound < np.abs(params["q_proj"]["kernel"]).max() <= 1.000001 * bound
  assert params["conv"].get("bias") is None


def test_without_convolution_the_projections_read_the_input():
  mixer = MetaLA(8, num_heads=2, conv_size=None, rngs=nnx.Rngs(0))
  want = reference.metala(float64_params(mixer), np.float64(inputs(1, 7)[0]), num_heads=2)
  out, state = apply(mixer, inputs(1, 7))
  assert relative_error(out[0], want) < 2e-6
  assert state.conv.inputs.shape == (1, 0, 8)


def test_metala_state_shapes_follow_options():
  state = MetaLA(8, num_heads=2, expand_k=1, expand_v=2, conv_size=3, rngs=nnx.Rngs(0)).init_state(
    5
  )
  assert (state.conv.inputs.shape, state.recurrent.kv.shape) == ((5, 2, 8), (5, 2, 4, 8))
  assert state.recurrent.kv.dtype == jnp.float32
