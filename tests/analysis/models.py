"""Small models with no parameter at its initial value, and texts."""

import functools

import jax
import numpy as np
from flax import nnx

from lnssm_jax.models import LanguageModel

VOCAB = 17
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, 12))


@functools.cache
def model(mixer="lnssm", **options) -> LanguageModel:
  """Of width 8, with 2 heads and no channel mixer; a pattern of 3 layers repeats `mixer`."""

  @jax.jit
  def build():
    made = LanguageModel(
      vocab_size=VOCAB,
      dim=8,
      num_layers=3,
      num_heads=2,
      mixer=mixer,
      channel_mixer="none",
      **options,
      rngs=nnx.Rngs(0),
    )
    leaves, structure = jax.tree.flatten(made)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noise = lambda leaf, key: leaf + 0.3 * jax.random.normal(key, leaf.shape, leaf.dtype)
    return jax.tree.unflatten(structure, map(noise, leaves, keys))

  return build()
