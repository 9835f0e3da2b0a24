"""Qwen3-Next and Qwen3.5 with experts in all layers, of transformers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from lnssm_jax.pretrained.families.fields import (
  Config,
  Field,
  Fixed,
  Free,
  Same,
  flag,
  free,
  size,
  without,
)
from lnssm_jax.pretrained.families.hybrids import (
  OF_FURTHER_TOKENS,
  OF_IMAGES,
  QWEN3_5_TEXT,
  QWEN3_NEXT,
  delta_hybrid,
  nested,
  nested_written,
  of_text_model,
  qwen3_5,
  qwen3_5_written,
  qwen3_next_written,
)
from lnssm_jax.pretrained.families.llama import LAYER
from lnssm_jax.pretrained.families.table import (
  GATED_MLP,
  Family,
  Row,
  Rows,
  View,
  experts,
  linear,
  linears,
)

_MLP, _MOE = f"{LAYER}.mlp", "channel_mixer_options"
_DENSE = ("intermediate_size", "moe_intermediate_size", "norm_topk_prob")
_DENSE += ("num_experts_per_tok", "shared_expert_intermediate_size", "mlp_only_layers")

_FIELDS = {
  "moe_intermediate_size": size("channel_hidden", 512),
  "shared_expert_intermediate_size": size(f"{_MOE}.shared_hidden", 512),
  "mlp_only_layers": Fixed([], written=False),
  **free("of layers without experts, of which there are none", "intermediate_size"),
  **free("of training", "output_router_logits", "router_aux_loss_coef"),
}


def fused(number: int) -> View:
  """Part `number` of 2 of [E, 2 F, D] -> [E, D, F]."""
  half = lambda x: x.reshape(len(x), 2, -1, x.shape[-1])[:, number]
  return View(lambda x: half(x).swapaxes(1, 2), lambda s: (s[0], 2 * s[2], s[1]))


SWAPPED = View(lambda x: x.swapaxes(1, 2), lambda s: (s[0], s[2], s[1]))

_EACH = experts(_MLP, **GATED_MLP)  # a tensor per expert
_TOGETHER: Rows = {
  "blocks.channel_mixer.experts.gate.kernel": Row(f"{_MLP}.experts.gate_up_proj", fused(0)),
  "blocks.channel_mixer.experts.up.kernel": Row(f"{_MLP}.experts.gate_up_proj", fused(1)),
  "blocks.channel_mixer.experts.down.kernel": Row(f"{_MLP}.experts.down_proj", SWAPPED),
}
_SHARED = (
  linear("blocks.channel_mixer.router", f"{_MLP}.gate")
  | linear("blocks.channel_mixer.shared_gate", f"{_MLP}.shared_expert_gate")
  | linears("blocks.channel_mixer.shared", f"{_MLP}.shared_expert", **GATED_MLP)
)


def _with_experts(
  dense: Family, fields: Mapping[str, Field | Fixed | Free | Same], **changes: Any
) -> Family:
  """The table of the dense models, with experts and a shared one with a gate."""
  rows = {x: row for x, row in dense.rows.items() if not x.startswith("blocks.channel_mixer")}
  return dataclasses.replace(
    dense,
    fields=without(dense.fields, *_DENSE) | _FIELDS | fields,
    constants=dense.constants | {"channel_mixer": "moe", f"{_MOE}.shared_gate": True},
    rows=rows | _SHARED | changes.pop("rows"),
    **changes,
  )


def _has_experts(config: Mapping[str, Any]) -> bool:
  """Whether all layers of Qwen3-Next have experts."""
  usual = not config.get("mlp_only_layers") and config.get("decoder_sparse_step", 1) in (1, None)
  return usual and config.get("num_experts", 512) != 0


def _next_written(config: Config) -> Config:
  return qwen3_next_written(config) | {"num_experts": config["num_experts"]}


QWEN3_NEXT_MOE = _with_experts(
  QWEN3_NEXT,
  {
    "num_experts": size(f"{_MOE}.num_experts", 512),
    "num_experts_per_tok": size(f"{_MOE}.experts_per_token", 10),
    "norm_topk_prob": flag(f"{_MOE}.normalize_weights", True),
    "decoder_sparse_step": Fixed(1, written=False),
    **OF_FURTHER_TOKENS,
  },
  rows=_EACH,
  normal=lambda config: delta_hybrid(config, num_key_value_heads=2),
  written=_next_written,
  has=_has_experts,
  skipped=r"mtp\..*",
)

QWEN3_5_MOE_TEXT = _with_experts(
  QWEN3_5_TEXT,
  {
    "num_experts": size(f"{_MOE}.num_experts", 256),
    "num_experts_per_tok": size(f"{_MOE}.experts_per_token", 8),
  },
  name="qwen3_5_moe_text",
  architecture="Qwen3_5MoeForCausalLM",
  rows=_TOGETHER,
  other_rows=_EACH,
  normal=lambda config: qwen3_5(config, groups=2),
  written=qwen3_5_written,
)

QWEN3_5_MOE = dataclasses.replace(
  QWEN3_5_MOE_TEXT,
  name="qwen3_5_moe",
  architecture="Qwen3_5MoeForConditionalGeneration",
  fields=QWEN3_5_MOE_TEXT.fields | OF_IMAGES,
  rows=of_text_model(QWEN3_5_MOE_TEXT.rows),
  other_rows=of_text_model(_EACH),
  normal=lambda config: QWEN3_5_MOE_TEXT.normal(nested(config, QWEN3_5_MOE_TEXT.name)),
  written=lambda config: nested_written(config, QWEN3_5_MOE_TEXT.name),
  skipped=r"(mtp|model\.visual)\..*",
)
