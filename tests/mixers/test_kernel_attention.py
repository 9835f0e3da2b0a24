"""Linear attention, normalized attention, Based: options, features, initial values, bad options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import LinearAttention, NormalizedAttention
from lnssm_jax.mixers.kernel_attention import _taylor_features
from tests.mixers.helpers import apply, float64_params, relative_error, split
from tests.mixers.references import kernel_attention as reference
from tests.mixers.tiny import DIM, inputs


def large(cls, **options):
  """A layer with kernels of the size that learning gives them."""
  graphdef, params = split(cls(DIM, num_heads=2, rngs=nnx.Rngs(0), **options))
  return nnx.merge(graphdef, jax.tree.map(lambda p: 20 * p + 0.1, params))


def error(mixer, transcription, **options):
  x = inputs(1, 9)
  params = {name: p for name, p in float64_params(mixer).items() if p is not None}
  want = transcription(params, np.float64(x[0]), num_heads=2, **options)
  return relative_error(apply(mixer, x)[0][0], want)


def test_linear_attention_identity_map_and_head_dim_match_reference():
  mixer = large(LinearAttention, feature_map="identity", use_bias=False, head_dim=3)
  assert error(mixer, reference.linear_attention, feature_map="identity") < 2e-6
  assert mixer.init_state(1).key_sum is None
  assert mixer.init_state(1).kv.shape == (1, 2, 3, 4)


@pytest.mark.parametrize("eta", ["softplus", "sigmoid"])
def test_normalized_attention_eta_functions_match_reference(eta):
  mixer = large(NormalizedAttention, eta=eta, head_dim=3, use_bias=False)
  assert error(mixer, reference.normalized_attention, eta=eta) < 2e-6


@pytest.mark.slow
def test_linear_attention_output_is_a_mean_of_values_for_any_input():
  """Features as small as exp(-1e6) neither vanish together nor leave the mean."""
  mixer = large(LinearAttention, use_bias=False)
  mixer.o_proj.kernel = nnx.Param(jnp.eye(DIM))
  x = 1e5 * inputs(2, 50)
  largest = jnp.max(jnp.abs(mixer.v_proj(x)), axis=1, keepdims=True)
  assert np.all(np.abs(apply(mixer, x)[0]) <= largest * (1 + 1e-5))


def test_taylor_features_multiply_to_the_series():
  q, k = np.float64(inputs(2, 5, seed=3)), np.float64(inputs(2, 5, seed=4))
  score = np.sum(q * k, axis=-1) / np.sqrt(DIM)
  got = jnp.sum(_taylor_features(jnp.float32(q)) * _taylor_features(jnp.float32(k)), axis=-1)
  np.testing.assert_allclose(got, 1 + score + score**2 / 2, rtol=1e-5)


def test_initial_kernels_and_biases():
  params = split(LinearAttention(128, num_heads=2, num_layers=8, rngs=nnx.Rngs(0)))[1]
  for name, std in (("q_proj", 0.02), ("v_proj", 0.02), ("o_proj", 0.005)):
    np.testing.assert_allclose(np.std(params[name]["kernel"]), std, rtol=0.03)
  assert not np.any(params["k_proj"]["bias"])
