"""Routing statistics against the selections that a mixer reports to its balance loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import analysis
from lnssm_jax.mixers import SSE
from tests.analysis.models import TOKENS, model
from tests.mixers import tiny


@pytest.mark.parametrize("name", ["sse", pytest.param("mom", marks=pytest.mark.slow)])
def test_shares_are_those_of_the_balance_loss(name):
  mixer, x = tiny.randomized(name), tiny.inputs(2, 9)
  (got,) = analysis.routing(mixer, x)
  aux = jax.jit(lambda mixer, x: mixer.with_aux(x)[2])(mixer, x)
  share = np.asarray(aux.share, np.float64)
  np.testing.assert_allclose(got.share, share, rtol=1e-6)
  np.testing.assert_allclose(np.mean(got.by_row, axis=0), share, rtol=1e-6)
  p = share / share.sum()
  np.testing.assert_allclose(got.load, p.max() * len(p), rtol=1e-6)
  entropy = -sum(v * np.log(v) for v in p if v) / np.log(len(p))
  np.testing.assert_allclose(got.entropy, entropy, rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(got.dead, share == 0)


def test_partition_that_no_token_selects_is_dead():
  options = {"num_partitions": 3, "num_readers": 2, "lora_rank": None}
  mixer = SSE(8, num_heads=2, **options, rngs=tiny.nnx.Rngs(0))
  x = jnp.ones((1, 4, 8))  # all tokens alike; one partition is written, two are read
  (got,) = analysis.routing(mixer, x)
  assert sorted(map(float, got.share)) == [0, 0, 1]
  assert (int(np.sum(got.dead)), float(got.load), float(got.entropy)) == (2, 3.0, 0.0)


def test_model_that_does_not_route_raises():
  with pytest.raises(NotImplementedError, match=r"no layer routes tokens .* the mixers are LNSSM"):
    analysis.routing(model(), TOKENS)
