"""Whole models and their blocks. Any mixer of `lnssm_jax.mixers` goes with any channel mixer."""

from lnssm_jax.models.block import Block
from lnssm_jax.models.channel_mixers import CHANNEL_MIXERS, GPT2MLP, GeGLU, SwiGLU
from lnssm_jax.models.language_model import REMAT_POLICIES, LanguageModel, count_parameters

__all__ = [
  "CHANNEL_MIXERS",
  "GPT2MLP",
  "REMAT_POLICIES",
  "Block",
  "GeGLU",
  "LanguageModel",
  "SwiGLU",
  "count_parameters",
]
