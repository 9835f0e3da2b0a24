"""Layers whose keys, values and decays have fewer heads than their queries."""

import jax
import numpy as np
import pytest
from flax import nnx

from lnssm_jax import ops
from lnssm_jax.mixers import MIXERS
from tests.mixers import tiny


@pytest.mark.parametrize("name", ["gla", "gsa"])
def test_neighboring_heads_share_keys_values_and_decays(name):
  """As in fla and in published models of grouped attention: head h has the keys of head h // 2."""
  mixer = MIXERS[name](tiny.DIM, num_heads=4, num_kv_heads=2, rngs=nnx.Rngs(0))

  @jax.jit
  def run(x):
    with ops.recording() as calls:
      mixer(x)
    return [[call.arguments[name] for name in ("k", "v", "log_decay")] for call in calls]

  for arguments in run(tiny.inputs(1, 3)):
    for x in arguments:
      if x is not None:
        first, second, third, fourth = np.moveaxis(np.asarray(x), 2, 0)
        np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(third, fourth)
        assert not np.array_equal(first, third)
