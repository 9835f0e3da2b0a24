"""Mamba-3: initial values."""

import numpy as np
from flax import nnx

from lnssm_jax.mixers import Mamba3
from tests.mixers.helpers import split
from tests.mixers.tiny import DIM


def test_initial_values_of_mimo_keep_the_size_of_one_input():
  params = split(Mamba3(DIM, head_dim=8, state_dim=8, mimo_rank=4, rngs=nnx.Rngs(0)))[1]
  np.testing.assert_array_equal(params["mimo_v"], np.full((2, 4, 8), 0.25))
  np.testing.assert_array_equal(params["mimo_o"], params["mimo_v"])
  for name in ("mimo_z", "b_offset", "c_offset"):
    np.testing.assert_array_equal(params[name], np.ones((2, 4, 8)))
