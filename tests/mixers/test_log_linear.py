"""Log-linear attention: levels over chunks, documents and states; the longest sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import LogLinear
from tests.mixers.helpers import apply, relative_error
from tests.mixers.references import log_linear as reference
from tests.mixers.tiny import DIM, disturbed, inputs

SIZES = {"state_dim": 3, "head_dim": 8, "max_length": 128}


def test_levels_of_long_documents_equal_float64_from_any_token_on():
  mixer, params = disturbed(lambda: LogLinear(DIM, num_groups=2, **SIZES, rngs=nnx.Rngs(0)))
  T = 66
  x, first = inputs(2, T, seed=3), inputs(2, T)
  ids = jnp.asarray(np.repeat([[0, 1], [4, 2]], [33, T - 33], axis=1))
  before = apply(mixer, x, mixer.init_state(2), jnp.zeros_like(ids))[1]
  out, _ = apply(mixer, first, before, ids)
  run = lambda x: reference.log_linear(params, np.float64(x), head_dim=8, num_groups=2)
  for row in range(2):
    joined = np.concatenate([x[row], first[row, :33]])
    want = np.concatenate([run(joined)[T:], run(first[row, 33:])])
    assert relative_error(out[row], want) < 3e-6


def test_sequence_beyond_the_maximum_length_raises_or_is_nan():
  mixer, _ = disturbed(lambda: LogLinear(DIM, **SIZES | {"max_length": 5}, rngs=nnx.Rngs(0)))
  x, ids = inputs(1, 6), jnp.zeros((1, 6), int)
  with pytest.raises(ValueError, match=r"LogLinear: x has 6 tokens .* max_length=5"):
    jax.eval_shape(mixer, x)
  out = apply(mixer, x, None, ids)[0]
  assert np.isfinite(out[:, :5]).all() and np.isnan(out[:, 5]).all()
