"""Small models with no parameter at its initial value, and texts."""

import functools

import numpy as np
from flax import nnx

from lnssm_jax.models import LanguageModel
from tests.mixers.helpers import drawn

VOCAB = 17
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, 12))


@functools.cache
def model(mixer="lnssm", **options) -> LanguageModel:
  """Of width 8, with 2 heads and no channel mixer; a pattern of 3 layers repeats `mixer`."""
  sizes = {"vocab_size": VOCAB, "dim": 8, "num_layers": 3, "num_heads": 2}
  options |= {"mixer": mixer, "channel_mixer": "none"}
  return drawn(lambda: LanguageModel(**sizes, **options, rngs=nnx.Rngs(0)))
