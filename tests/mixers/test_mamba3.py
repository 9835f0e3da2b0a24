"""Mamba-3: its angles over documents and whole turns, initial values."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lnssm_jax.mixers import Mamba3
from lnssm_jax.mixers.common.angles import running_angles
from lnssm_jax.ops.core.segments import segments_of
from tests.mixers.helpers import split
from tests.mixers.tiny import DIM


def test_angles_are_summed_in_each_document_and_continue():
  random = np.random.default_rng(0)
  step = jnp.asarray(random.normal(1, 3, (2, 70, 3)), jnp.float32)
  start, ids = jnp.asarray([[0.5, -3, 2]] * 2), np.sort(random.integers(5, size=(2, 70)))
  segments = segments_of("test", jnp.asarray(ids), 2, 70)
  angle, last = jax.jit(lambda *x: running_angles(*x, segments, None))(step, start)
  assert np.abs(angle).max() < 3.2
  for row in range(2):
    for number in range(5):
      where = ids[row] == number
      want = np.cumsum(np.float64(step[row, where]), axis=0) + (number == 0) * start[row]
      assert np.abs(np.exp(1j * np.float64(angle[row, where])) - np.exp(1j * want)).max() < 1e-4
  np.testing.assert_array_equal(last, angle[:, -1])


def test_initial_values_of_mimo_keep_the_size_of_one_input():
  params = split(Mamba3(DIM, head_dim=8, state_dim=8, mimo_rank=4, rngs=nnx.Rngs(0)))[1]
  np.testing.assert_array_equal(params["mimo_v"], np.full((2, 4, 8), 0.25))
  np.testing.assert_array_equal(params["mimo_o"], params["mimo_v"])
  for name in ("mimo_z", "b_offset", "c_offset"):
    np.testing.assert_array_equal(params[name], np.ones((2, 4, 8)))
