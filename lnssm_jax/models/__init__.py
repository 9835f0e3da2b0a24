"""Whole models and their blocks. Any mixer of `lnssm_jax.mixers` goes with any channel mixer.

Each name is imported when it is first used: reading settings (`ModelConfig`) imports no JAX.
"""

from typing import TYPE_CHECKING

from lnssm_jax.lazy import names_of

_HOMES = {
  "backbone": ("Backbone",),
  "bidirectional": ("Bidirectional",),
  "block": ("NORMS", "Block", "BlockState"),
  "channel_mixers": (
    *(
      "CHANNEL_MIXERS",
      "GPT2MLP",
      "GeGLU",
      "MixtureOfExperts",
      "RWKV4ChannelMix",
      "RWKV6ChannelMix",
      "RWKV7ChannelMix",
      "SwiGLU",
    ),
  ),
  "config": ("BackboneConfig", "ModelConfig", "VisionConfig"),
  "conversion": ("replace_mixers",),
  "cross_attention": ("CrossAttention",),
  "language_model": ("LanguageModel",),
  "layers": ("REMAT_POLICIES", "aux_loss"),
  "parallel": ("Parallel",),
  "shared": ("AfterShared",),
  "settings": ("count_parameters",),
  "vision_model": ("VisionModel",),
}
_HOME_OF = {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)  # pyrefly: ignore

if TYPE_CHECKING:
  from lnssm_jax.models.backbone import Backbone as Backbone
  from lnssm_jax.models.bidirectional import Bidirectional as Bidirectional
  from lnssm_jax.models.block import NORMS as NORMS
  from lnssm_jax.models.block import Block as Block
  from lnssm_jax.models.block import BlockState as BlockState
  from lnssm_jax.models.channel_mixers import CHANNEL_MIXERS as CHANNEL_MIXERS
  from lnssm_jax.models.channel_mixers import GPT2MLP as GPT2MLP
  from lnssm_jax.models.channel_mixers import GeGLU as GeGLU
  from lnssm_jax.models.channel_mixers import MixtureOfExperts as MixtureOfExperts
  from lnssm_jax.models.channel_mixers import RWKV4ChannelMix as RWKV4ChannelMix
  from lnssm_jax.models.channel_mixers import RWKV6ChannelMix as RWKV6ChannelMix
  from lnssm_jax.models.channel_mixers import RWKV7ChannelMix as RWKV7ChannelMix
  from lnssm_jax.models.channel_mixers import SwiGLU as SwiGLU
  from lnssm_jax.models.config import BackboneConfig as BackboneConfig
  from lnssm_jax.models.config import ModelConfig as ModelConfig
  from lnssm_jax.models.config import VisionConfig as VisionConfig
  from lnssm_jax.models.conversion import replace_mixers as replace_mixers
  from lnssm_jax.models.cross_attention import CrossAttention as CrossAttention
  from lnssm_jax.models.language_model import LanguageModel as LanguageModel
  from lnssm_jax.models.layers import REMAT_POLICIES as REMAT_POLICIES
  from lnssm_jax.models.layers import aux_loss as aux_loss
  from lnssm_jax.models.parallel import Parallel as Parallel
  from lnssm_jax.models.settings import count_parameters as count_parameters
  from lnssm_jax.models.shared import AfterShared as AfterShared
  from lnssm_jax.models.vision_model import VisionModel as VisionModel
else:
  __getattr__, __dir__ = names_of(__name__, _HOME_OF)
