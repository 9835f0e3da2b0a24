"""Granite 4 (IBM 2025, granitemoehybrid), of transformers: Bamba with multipliers and experts."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from lnssm_jax.ops.core.checks import is_number
from lnssm_jax.pretrained.families.fields import (
  Config,
  Field,
  Fixed,
  choice,
  count_of_layers,
  free,
  number,
  size,
  without,
)
from lnssm_jax.pretrained.families.hybrids import (
  ATTENTION,
  BAMBA,
  BAMBA_NAMES,
  bamba_sizes,
  bamba_sizes_written,
  by_pattern,
  pattern_written,
)
from lnssm_jax.pretrained.families.llama import LAYER, whole_heads
from lnssm_jax.pretrained.families.qwen_experts import SWAPPED, fused
from lnssm_jax.pretrained.families.table import TRANSPOSED, Row, Rows, View, linear, norm
from lnssm_jax.pretrained.manifest import ExportError

_MOE = "channel_mixer_options"
_POSITIONS = {"nope": "none", None: "none", "rope": "rotary"}


def _layers(config: Config) -> tuple[Config, list[Any]]:
  """The config without what is the same for all kinds of layers, and the kind of each."""
  L, types = count_of_layers(config), config.pop("layer_types", None)
  other = config.pop("layers_block_type", None)
  types = (["mamba"] * L if other is None else other) if types is None else types
  if not isinstance(types, list) or other not in (None, types):
    raise ExportError(
      f"layer_types={types!r:.80}, layers_block_type={other!r:.80} must be one list of layers."
    )
  config.setdefault("num_key_value_heads", None)
  divisor = config.pop("logits_scaling", 1.0)
  if not is_number(divisor) or not 0 < divisor < math.inf:
    raise ExportError(f"logits_scaling={divisor!r:.80} must be a number above 0.")
  config["logit_scale"] = 1 / divisor
  return config, [BAMBA_NAMES.get(str(x), x) for x in types]


def _normal(config: Config) -> Config:
  config, types = _layers(config)
  return bamba_sizes(config, types, 1.0, 2048)


def _normal_attention(config: Config) -> Config:
  config, types = _layers(config)
  return without(whole_heads(by_pattern(config, types, None, 1.0, 2048)), "mixers")


def _written(config: Config) -> Config:
  config["logits_scaling"] = 1 / config.pop("logit_scale")
  config, types = bamba_sizes_written(config)
  del config["partial_rotary_factor"]
  theirs = {ours: name for name, ours in BAMBA_NAMES.items()}
  return config | {"layer_types": [theirs[x] for x in types]}


def _written_attention(config: Config) -> Config:
  K, L = config["hidden_size"] // config["num_attention_heads"], config["num_hidden_layers"]
  all_of_them = {"mixers": ["softmax_attention"], "head_dim": K}
  config, _ = pattern_written(config | all_of_them, "head_dim")
  del config["partial_rotary_factor"]
  return config | {
    "logits_scaling": 1 / config.pop("logit_scale"),
    "layer_types": ["attention"] * L,
  }


def _half(number: int) -> View:
  """Part `number` of 2 of [2 F, D] -> [D, F]."""
  return View(lambda x: x.reshape(2, -1, x.shape[-1])[number].T, lambda s: (2 * s[1], s[0]))


def _mlp(ours: str) -> Rows:
  name = f"{LAYER}.shared_mlp"
  return {
    f"{ours}.gate.kernel": Row(f"{name}.input_linear.weight", _half(0)),
    f"{ours}.up.kernel": Row(f"{name}.input_linear.weight", _half(1)),
    f"{ours}.down.kernel": Row(f"{name}.output_linear.weight", TRANSPOSED),
  }


_EXPERTS = f"{LAYER}.block_sparse_moe"
_ROWS = {
  name: row for name, row in BAMBA.rows.items() if not name.startswith(("norm", "blocks.channel_"))
} | {
  **norm("norm", "model.norm"),
  **norm("blocks.channel_norm", f"{LAYER}.post_attention_layernorm"),
}
_NOT_THERE = ("mlp_bias", "attn_rotary_emb", "intermediate_size", "z_loss_coefficient")


def _has_experts(config: Mapping[str, Any]) -> bool:
  return config.get("num_local_experts", 8) != 0


def _is_attention(config: Mapping[str, Any]) -> bool:
  """Whether no layer is recurrent, as of those with rotations."""
  types = config.get("layer_types") or config.get("layers_block_type")
  return isinstance(types, list) and {*map(str, types)} <= {"attention", "full_attention"}


GRANITE = dataclasses.replace(
  BAMBA,
  name="granitemoehybrid",
  architecture="GraniteMoeHybridForCausalLM",
  fields=without(BAMBA.fields, *_NOT_THERE)
  | {
    "rms_norm_eps": number(("norm_eps", "mixer_options.mamba2.norm_eps"), 1e-6),
    "shared_intermediate_size": size("channel_hidden", 1024),
    "position_embedding_type": choice(f"{ATTENTION}.positions", _POSITIONS, None),
    "attention_multiplier": number(f"{ATTENTION}.scale", 1.0),
    "embedding_multiplier": number("embedding_scale", 1.0),
    "residual_multiplier": number("residual_scale", 1.0),
    "logit_scale": number("logit_scale"),
    **free("of training", "output_router_logits", "router_aux_loss_coef"),
    **free("of experts, of which there are none", "intermediate_size", "num_experts_per_tok"),
    "num_local_experts": Fixed(0),
    "normalization_function": Fixed("rmsnorm", written=False),
    **free("of random parameters", "init_method"),
  },
  rows=_ROWS | _mlp("blocks.channel_mixer"),
  normal=_normal,
  written=_written,
  has=lambda config: not _has_experts(config) and not _is_attention(config),
)
GRANITE_MOE = dataclasses.replace(
  GRANITE,
  fields=GRANITE.fields
  | {
    "intermediate_size": size("channel_hidden", 11008),
    "shared_intermediate_size": size(f"{_MOE}.shared_hidden", 1024),
    "num_local_experts": size(f"{_MOE}.num_experts", 8),
    "num_experts_per_tok": size(f"{_MOE}.experts_per_token", 2),
  },
  constants=GRANITE.constants | {"channel_mixer": "moe"},
  rows=_ROWS
  | _mlp("blocks.channel_mixer.shared")
  | linear("blocks.channel_mixer.router", f"{_EXPERTS}.router.layer")
  | {
    "blocks.channel_mixer.experts.gate.kernel": Row(f"{_EXPERTS}.input_linear.weight", fused(0)),
    "blocks.channel_mixer.experts.up.kernel": Row(f"{_EXPERTS}.input_linear.weight", fused(1)),
    "blocks.channel_mixer.experts.down.kernel": Row(f"{_EXPERTS}.output_linear.weight", SWAPPED),
  },
  has=_has_experts,
)


def _of_attention(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Fields of a hybrid for a model whose only mixer is attention."""
  found, unused = {}, ["mamba_n_heads", "time_step_limit"]
  for name, field in fields.items():
    if not isinstance(field, Field):
      found[name] = field
      continue
    paths = [path.replace(f"{ATTENTION}.", "mixer_options.") for path in field.paths]
    own = [
      x for x in paths if not x.startswith(("mixer_options.mamba2", "mixer_options.num_heads"))
    ]
    found |= {name: dataclasses.replace(field, ours=tuple(own))} if own else {}
    unused += [] if own else [name]
  return found | free("of layers of Mamba-2, of which there are none", *unused)


GRANITE_ATTENTION = dataclasses.replace(
  GRANITE,
  fields=_of_attention(without(GRANITE.fields, "mixers", "min_step", "max_step")),
  constants=GRANITE.constants | {"mixer": "softmax_attention"},
  normal=_normal_attention,
  written=_written_attention,
  has=lambda config: not _has_experts(config) and _is_attention(config),
)
