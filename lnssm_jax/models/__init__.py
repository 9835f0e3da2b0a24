"""Whole models and their blocks. Any mixer of `lnssm_jax.mixers` goes with any channel mixer."""

from lnssm_jax.models.block import NORMS, Block, BlockState
from lnssm_jax.models.channel_mixers import (
  CHANNEL_MIXERS,
  GPT2MLP,
  GeGLU,
  RWKV4ChannelMix,
  RWKV6ChannelMix,
  SwiGLU,
)
from lnssm_jax.models.conversion import replace_mixers
from lnssm_jax.models.language_model import LanguageModel
from lnssm_jax.models.layers import REMAT_POLICIES, aux_loss
from lnssm_jax.models.settings import count_parameters
from lnssm_jax.models.vision_model import Bidirectional, VisionModel

__all__ = [
  "CHANNEL_MIXERS",
  "GPT2MLP",
  "NORMS",
  "REMAT_POLICIES",
  "Bidirectional",
  "Block",
  "BlockState",
  "GeGLU",
  "LanguageModel",
  "RWKV4ChannelMix",
  "RWKV6ChannelMix",
  "SwiGLU",
  "VisionModel",
  "aux_loss",
  "count_parameters",
  "replace_mixers",
]
