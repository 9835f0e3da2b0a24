"""The embedding lookup and its gradient, against sums in float64."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lnssm_jax.models import LanguageModel
from lnssm_jax.models.embedding import lookup
from tests.mixers.helpers import drawn


def test_gradient_sums_over_every_place_of_a_token():
  rng = np.random.default_rng(0)
  table = jnp.asarray(rng.normal(size=(37, 8)), jnp.float32)
  tokens = rng.zipf(1.3, size=(3, 50)) % 37  # some often, some never
  weights = rng.normal(size=(3, 50, 8)).astype(np.float32)
  rows, gradient = jax.jit(
    lambda table: (
      lookup(table, tokens),
      jax.grad(lambda t: jnp.sum(lookup(t, tokens) * weights))(table),
    )
  )(table)
  np.testing.assert_array_equal(rows, np.asarray(table)[tokens])
  want = np.zeros((37, 8))
  np.add.at(want, tokens.reshape(-1), weights.reshape(-1, 8).astype(np.float64))
  np.testing.assert_allclose(gradient, want, rtol=1e-5, atol=1e-5)
  assert (np.abs(want).sum(1) == 0).any()  # a token that does not occur has a gradient of 0


def test_ids_outside_the_table_are_nan_and_have_no_gradient():
  table = jnp.ones((4, 2))
  tokens = jnp.asarray([[1, 4, -1, 3]])
  assert np.isnan(lookup(table, tokens)[0]).any(-1).tolist() == [False, True, True, False]
  gradient = jax.grad(lambda t: jnp.sum(lookup(t, tokens)))(table)
  np.testing.assert_array_equal(gradient.sum(1), [0, 2, 0, 2])


def test_scale_of_an_embedding_multiplies_in_the_dtype_of_the_model():
  options = {"vocab_size": 9, "dim": 8, "num_layers": 1, "mixer": "lrn", "embedding_norm": False}
  options |= {"embedding_scale": 8**0.5, "dtype": jnp.bfloat16, "channel_mixer": "none"}
  build = lambda: LanguageModel(**options, rngs=nnx.Rngs(0))
  model = drawn(build)
  rounded = model.embedding[...].astype(jnp.bfloat16)
  want = rounded * jnp.bfloat16(8**0.5)
  np.testing.assert_array_equal(model.embed(jnp.arange(9)[None])[0], want)


def test_a_bfloat16_table_sums_in_float32():
  table = jnp.zeros((2, 1), jnp.bfloat16)
  tokens = jnp.zeros(3_000, jnp.int32)
  loss = lambda table, tokens: jnp.sum(lookup(table, tokens).astype(jnp.float32))
  gradient = jax.jit(jax.grad(loss))(table, tokens)
  assert gradient.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.asarray(gradient, np.float32), [[3_000], [0]], rtol=2**-8)
