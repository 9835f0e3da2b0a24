"""MetaLA: its own-token term at the start, size, bad options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import MetaLA
from lnssm_jax.models import count_parameters
from tests.mixers.plain_lnssm import split


def test_initial_values():
  params = split(MetaLA(64, num_heads=4, rngs=nnx.Rngs(0)))[1]
  for name in ("own_gain", "g_bias"):
    assert not np.any(params[name])
  bound = 2**-2.5 * np.sqrt(6 / (64 + 32))
  assert 0.98 * bound < np.abs(params["q_proj"]["kernel"]).max() <= 1.000001 * bound
  assert params["conv"].get("bias") is None


def test_parameters_are_counted_by_a_formula():
  """Queries and decays of width D / 2; values, gate and output of D."""
  D = 64
  layer = jax.eval_shape(lambda: MetaLA(D, num_heads=4, rngs=nnx.Rngs(0)))
  assert count_parameters(layer) == 2 * D * D // 2 + 3 * D * D + 4 * D + D // 2 + D


def test_the_state_is_that_of_the_scan_and_the_convolution():
  state = MetaLA(8, num_heads=2, expand_k=1, expand_v=2, conv_width=3, rngs=nnx.Rngs(0)).init_state(
    5
  )
  assert (state.conv.shape, state.memory.kv.shape) == ((5, 2, 8), (5, 2, 4, 8))
  assert state.memory.kv.dtype == jnp.float32


@pytest.mark.parametrize(
  "options, message",
  [
    ({"num_heads": 3}, r"expand_k=0.5 of dim=8 gives 4.0 channels"),
    ({"num_heads": 2, "expand_v": 0.3}, "expand_v=0.3 of dim=8"),
    ({"num_heads": 2, "gate_temperature": 0}, "gate_temperature=0 must"),
    ({"num_heads": 2, "conv_width": 0}, "width=0 must"),
  ],
)
def test_bad_options_are_named(options, message):
  with pytest.raises(ValueError, match=message):
    MetaLA(8, **options, rngs=nnx.Rngs(0))
