"""cosFormer and LRPE: the maximum length, empty sums, initial values, size, bad options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import LRPE, CosFormer
from lnssm_jax.mixers.positional_attention import cosine_features
from tests.mixers.helpers import apply, split
from tests.mixers.tiny import DIM, inputs


def test_cosine_features_multiply_to_the_cosine_of_the_distance():
  q, k = inputs(1, 5, seed=3)[:, :, None], inputs(1, 5, seed=4)[:, :, None]
  theta, t = np.linspace(0.1, 2, DIM)[None], np.arange(5)[None]
  got = jnp.einsum("bthk,bshk->bts", *(cosine_features(z, t, jnp.float32(theta)) for z in (q, k)))
  lag = (t.T - t)[..., None]
  want = np.sum(np.float64(q[0]) * np.float64(k[0, None, :, 0]) * np.cos(lag * theta), axis=-1)
  np.testing.assert_allclose(got[0], want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_cosformer_beyond_max_length_raises_or_is_nan():
  mixer, x = CosFormer(DIM, num_heads=2, max_length=6, rngs=nnx.Rngs(0)), inputs(2, 7)
  with pytest.raises(ValueError, match=r"CosFormer: x has 7 tokens after 0 .* max_length=6"):
    mixer(x)
  segment_ids = jnp.repeat(jnp.array([[1, 2]] * 2), jnp.array([1, 6]), 1, total_repeat_length=7)
  out, state = apply(mixer, x, None, segment_ids)
  assert np.isfinite(out).all()
  with pytest.raises(ValueError, match=r"x has 7 tokens after 6 others"):
    mixer(x, state)
  out, _ = apply(mixer, x, state)
  assert np.isnan(out).all()


def test_cosformer_without_positive_keys_is_zero():
  """And has finite gradients: nothing is divided by nothing."""
  mixer = CosFormer(DIM, num_heads=2, rngs=nnx.Rngs(0))
  mixer.k_proj.kernel = nnx.Param(-jnp.ones((DIM, DIM)))
  x = jnp.abs(inputs(1, 4))
  loss = lambda mixer: jnp.sum(jnp.abs(mixer(x)[0]))
  value, gradient = jax.jit(jax.value_and_grad(loss))(mixer)
  assert value == 0
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_angles_start_geometric_over_all_channels():
  theta = split(LRPE(DIM, num_heads=2, rngs=nnx.Rngs(0)))[1]["theta"]
  np.testing.assert_allclose(theta, 10000.0 ** (-np.arange(8) / 4), rtol=1e-5)
