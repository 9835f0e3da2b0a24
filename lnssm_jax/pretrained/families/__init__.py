"""Families of published models, one readable table each.

Settings are those of the published files and of the classes that read them. Which files were seen
whole, and which in parts, is in tests/peers/published_configs.py and published_hybrid_configs.py.
"""

from collections.abc import Mapping
from typing import Any

from lnssm_jax.pretrained.families.dense import MISTRAL, QWEN2, QWEN3
from lnssm_jax.pretrained.families.falcon_h1 import FALCON_H1
from lnssm_jax.pretrained.families.fla import FLA
from lnssm_jax.pretrained.families.fla_hybrids import FLA_HYBRIDS
from lnssm_jax.pretrained.families.granite import GRANITE, GRANITE_ATTENTION, GRANITE_MOE
from lnssm_jax.pretrained.families.griffin import RECURRENT_GEMMA
from lnssm_jax.pretrained.families.hybrids import BAMBA, QWEN3_5, QWEN3_5_TEXT, QWEN3_NEXT
from lnssm_jax.pretrained.families.jamba import JAMBA, JAMBA_DENSE
from lnssm_jax.pretrained.families.kimi_linear import KIMI_LINEAR
from lnssm_jax.pretrained.families.lfm2 import LFM2, LFM2_MOE
from lnssm_jax.pretrained.families.ling import LING
from lnssm_jax.pretrained.families.llama import LLAMA
from lnssm_jax.pretrained.families.mamba import FALCON_MAMBA, MAMBA, MAMBA2, MAMBA2_SSM, MAMBA_SSM
from lnssm_jax.pretrained.families.nemotron_h import NEMOTRON_H, NEMOTRON_H_MOE
from lnssm_jax.pretrained.families.olmo_hybrid import OLMO_HYBRID
from lnssm_jax.pretrained.families.qwen_experts import QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_NEXT_MOE
from lnssm_jax.pretrained.families.rwkv4 import RWKV4
from lnssm_jax.pretrained.families.rwkv6 import RWKV6
from lnssm_jax.pretrained.families.rwkv7 import RWKV7
from lnssm_jax.pretrained.families.table import Family
from lnssm_jax.pretrained.families.zamba2 import ZAMBA2
from lnssm_jax.pretrained.manifest import ExportError

__all__ = ["FAMILIES", "Family", "family_of"]

FAMILIES: tuple[Family, ...] = (
  LLAMA,
  QWEN2,
  QWEN3,
  MISTRAL,
  MAMBA,
  MAMBA2,
  FALCON_MAMBA,
  RWKV4,
  RECURRENT_GEMMA,
  BAMBA,
  GRANITE_MOE,
  GRANITE,
  GRANITE_ATTENTION,
  QWEN3_NEXT_MOE,
  QWEN3_5_MOE_TEXT,
  QWEN3_5_MOE,
  QWEN3_5_TEXT,  # before Qwen3-Next, whose dense models have the same function
  QWEN3_5,
  QWEN3_NEXT,
  LFM2,
  LFM2_MOE,
  OLMO_HYBRID,
  NEMOTRON_H_MOE,
  NEMOTRON_H,
  JAMBA,
  JAMBA_DENSE,
  KIMI_LINEAR,
  LING,
  FALCON_H1,
  ZAMBA2,
  *FLA,
  RWKV6,
  RWKV7,
  *FLA_HYBRIDS,
  MAMBA_SSM,
  MAMBA2_SSM,
)


def family_of(config: Mapping[str, Any]) -> Family:
  """The family of a config.json.

  Raises:
    ExportError: it is of none.
  """
  name = config.get("model_type")
  if name is None and {"d_model", "n_layer"} <= config.keys():
    layer = config["ssm_cfg"].get("layer") if isinstance(config.get("ssm_cfg"), dict) else None
    name = "mamba2_ssm" if layer == "Mamba2" else "mamba_ssm"
  first = FLA_HYBRIDS if config.get("attn") is not None else ()
  for family in (*first, *FAMILIES):
    if family.name == name and family.has(config):
      return family
  names = ", ".join(dict.fromkeys(family.name for family in FAMILIES))
  raise ExportError(f"model_type={name!r:.80} is not implemented; the families are {names}.")
