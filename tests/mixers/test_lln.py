"""LLN attention: mixtures, moment matching, exponents of any size, size, bad options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import LLN
from lnssm_jax.mixers.lln import _bounded_exponents
from tests.mixers.helpers import apply, float64_params, relative_error, split
from tests.mixers.references import lln as reference
from tests.mixers.tiny import DIM, inputs


def large(**options):
  """A layer with kernels of the size that learning gives them."""
  graphdef, params = split(LLN(DIM, num_heads=2, rngs=nnx.Rngs(0), **options))
  return nnx.merge(graphdef, jax.tree.map(lambda p: 20 * p + 0.1, params))


@pytest.mark.slow
def test_lln_free_mixture_without_matching_matches_reference():
  """And means of values, for inputs however large: their exponents are bounded."""
  mixer, x = large(mixture="free", matching="none", use_bias=True), inputs(1, 9)
  want = reference.lln(float64_params(mixer), np.float64(x[0]), num_heads=2, matching="none")
  assert relative_error(apply(mixer, x)[0][0], want) < 2e-6

  mixer.lln_gain, mixer.block_gain = (nnx.Param(jnp.full(DIM, 0.5)) for _ in range(2))
  mixer.o_proj.kernel = nnx.Param(jnp.eye(DIM))
  mixer.o_proj.bias = nnx.Param(jnp.zeros(DIM))
  x = 1e6 * x
  largest = jnp.max(jnp.abs(mixer.v_proj(x)), axis=1, keepdims=True)
  assert np.all(np.abs(apply(mixer, x)[0]) <= largest * (1 + 1e-5))


def test_lln_convex_mixture_interpolates():
  mixer = LLN(DIM, num_heads=2, mixture="convex", rngs=nnx.Rngs(0))
  mixer.lln_gain = nnx.Param(jnp.linspace(0, 1, DIM))
  far, near = inputs(1, 3, seed=1), inputs(1, 3, seed=2)
  heads = lambda z: z.reshape(1, 3, 2, 4)
  weight = np.linspace(0, 1, DIM)
  got = mixer._mixed(heads(far), heads(near)).reshape(1, 3, DIM)
  np.testing.assert_allclose(got, weight * far + (1 - weight) * near, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_matching_gives_the_weights_the_log_variance_of_softmax():
  """At the end of a sequence, whose moments are those of the whole."""
  mixer, x = LLN(DIM, num_heads=2, rngs=nnx.Rngs(0)), 40 * inputs(1, 64)
  q, k, _ = (z + 0.5 for z in mixer._queries_keys_values(x))
  state = mixer.init_state(1)
  matched_q, matched_k, moments = mixer._matched(q, k, state.moments, None)
  assert moments.h[0, 0] == 64
  alpha = np.mean(matched_q[0, -1] / q[0, -1])
  beta = np.mean(matched_k[0, -1] / k[0, -1])
  total = alpha**2 * np.var(q) + beta**2 * np.var(k)
  softmax = np.var(q) * np.var(k)
  np.testing.assert_allclose(0.14855178 * total - 0.35487039, softmax, rtol=1e-3)


def test_exponents_are_bounded_and_their_weights_the_same():
  q, k = (3 * inputs(1, 7, seed=s)[:, :, None] for s in (5, 6))
  before = jnp.full((1, 1, DIM), -1e38)
  new_q, new_k, log_decay, highest = (np.float64(z) for z in _bounded_exponents(q, k, before, None))
  for z in (new_q, new_k, log_decay):
    assert z.max() <= 0
  np.testing.assert_array_equal(highest, np.max(k, axis=1))
  # What is left of key s at time t: exp(new_k_s) and the decays since.
  left = new_k[0, 2, 0] + log_decay[0, 3:6, 0].sum(0)
  got = np.exp(new_q[0, 5, 0] + left).sum() / np.exp(new_q[0, 5, 0] + new_k[0, 5, 0]).sum()
  exact = np.float64(q[0, 5, 0])[None] + np.float64(k[0, [2, 5], 0])
  want = np.exp(exact).sum(-1)
  np.testing.assert_allclose(got, want[0] / want[1], rtol=1e-4)
