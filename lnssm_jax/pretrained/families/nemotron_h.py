"""Nemotron-H (NVIDIA 2025, also Nano v2), of transformers: each layer is one branch.

That is Mamba-2, attention without positions, or an MLP of squared ReLU, or in Nemotron 3 experts of
that kind, which may read and write vectors of moe_latent_size (Super). Steps are clipped as
time_step_limit says, as in NVIDIA's code; transformers 5.23 takes time_step_min as the least.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from lnssm_jax.pretrained.families.fields import (
  Config,
  Field,
  Fixed,
  choice,
  flag,
  free,
  number,
  number_or_none,
  same,
  size,
  size_or_none,
  whole,
)
from lnssm_jax.pretrained.families.hybrids import ATTENTION, pattern
from lnssm_jax.pretrained.families.mamba import mamba2, steps, steps_written
from lnssm_jax.pretrained.families.table import (
  QKVO,
  TRANSPOSED,
  Family,
  Row,
  experts,
  linear,
  linears,
  norm,
)
from lnssm_jax.pretrained.manifest import ExportError

_MAMBA, _LAYER = "mixer_options.mamba2", "backbone.layers.{}"
_MIXER = f"{_LAYER}.mixer"
# {kind of a layer: (its letter, ours: the mixer, the channel mixer)}
_KINDS = {
  "linear_attention": ("M", "mamba2", "none"),
  "full_attention": ("*", "softmax_attention", "none"),
  "mlp": ("-", "none", "gpt2"),
  "moe": ("E", "none", "moe"),
}
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}


def _types(config: Config) -> list[str]:
  """The kind of each layer, which several settings say."""
  letters = {letter: kind for kind, (letter, _, _) in _KINDS.items()}
  found: dict[str, Any] = {}
  if (word := config.pop("hybrid_override_pattern", None)) is not None:
    found["hybrid_override_pattern"] = [letters.get(str(x), x) for x in list(str(word))]
  for name in ("layers_block_type", "layer_types"):
    if (given := config.pop(name, None)) is not None:
      kinds = given if isinstance(given, list) else [given]
      found[name] = [_OLDER.get(str(x), x) for x in kinds]
  if not found:
    raise ExportError("layers_block_type is missing.")
  name, types = next(iter(found.items()))
  if (found_kinds := set(map(str, types))) not in (_KINDS.keys() - {x} for x in ("mlp", "moe")):
    raise ExportError(
      f"{name}={types!r:.80} must have layers of linear_attention, full_attention, and either mlp"
      f" or moe; it has {', '.join(sorted(found_kinds))}."
    )
  for other, kinds in found.items():
    if kinds != types:
      raise ExportError(f"{other} is not what {name} says; correct the one that is wrong.")
  L = config.get("num_hidden_layers")
  if L is not None and (type(L) is not int or len(types) != L):
    raise ExportError(f"num_hidden_layers={L!r:.80} is not that of {name}, {len(types)}.")
  return types


def _normal(config: Config) -> Config:
  types = _types(config)
  kinds = pattern(types)
  D, H = whole(config, "hidden_size", 4096), whole(config, "mamba_num_heads", 128)
  config.pop("mamba_num_heads", None)
  P = whole(config, "mamba_head_dim", 64)
  if config.get("num_key_value_heads", 8) is None:
    config["num_key_value_heads"] = whole(config, "num_attention_heads", 32)
  return steps(config) | {
    "num_hidden_layers": len(types),
    "mixers": [_KINDS[x][1] for x in kinds],
    "channel_mixers": [_KINDS[x][2] for x in kinds],
    "mamba_head_dim": P,
    "mamba_expand": H * P / D,
  }


def _written(config: Config) -> Config:
  config = steps_written(config)
  pairs = list(zip(config.pop("mixers"), config.pop("channel_mixers"), strict=True))
  kinds = {(mixer, channel): kind for kind, (_, mixer, channel) in _KINDS.items()}
  types = [kinds[pairs[i % len(pairs)]] for i in range(config["num_hidden_layers"])]
  inner = round(config.pop("mamba_expand") * config["hidden_size"])
  config["mamba_num_heads"] = inner // config["mamba_head_dim"]
  word = "".join(_KINDS[x][0] for x in types)
  return config | {"hybrid_override_pattern": word}


def _has_experts(config: Mapping[str, Any]) -> bool:
  names = ("hybrid_override_pattern", "layers_block_type", "layer_types")
  listed = [x for name in names if isinstance(x := config.get(name), str | list)]
  return any("E" in x or "moe" in x for x in listed)


NEMOTRON_H = Family(
  name="nemotron_h",
  layout="hf",
  architecture="NemotronHForCausalLM",
  fields={
    "vocab_size": size("vocab_size", 131072),
    "hidden_size": size("dim", 4096),
    "num_hidden_layers": size("num_layers"),
    "mixers": Field("mixer", (list,)),
    "channel_mixers": Field("channel_mixer", (list,)),
    "intermediate_size": size("channel_hidden", 21504),
    "mlp_hidden_act": choice(
      "channel_mixer_options.activation", {"relu2": "squared_relu"}, "relu2"
    ),
    "mlp_bias": flag("channel_mixer_options.use_bias", False),
    "layer_norm_epsilon": number(("norm_eps", f"{_MAMBA}.norm_eps"), 1e-5),
    "norm_eps": same("layer_norm_epsilon"),
    "rms_norm_eps": same("layer_norm_epsilon"),
    "num_query_groups": same("num_key_value_heads"),
    "tie_word_embeddings": flag("tie_embeddings", False),
    "num_attention_heads": size((f"{ATTENTION}.num_heads", "num_heads"), 32),
    "num_key_value_heads": size(f"{ATTENTION}.num_kv_heads", 8),
    "head_dim": size((f"{ATTENTION}.head_dim", f"{ATTENTION}.value_head_dim"), 128),
    "max_position_embeddings": size(f"{ATTENTION}.max_length", 4096),
    "attention_bias": flag(f"{ATTENTION}.use_bias", False),
    "attention_dropout": number(f"{ATTENTION}.attention_dropout", 0.0),
    "sliding_window": Fixed(None, written=False),
    "ssm_state_size": size(f"{_MAMBA}.state_dim", 128),
    "mamba_head_dim": size(f"{_MAMBA}.head_dim"),
    "mamba_expand": number(f"{_MAMBA}.expand"),
    "n_groups": size(f"{_MAMBA}.num_groups", 8),
    "conv_kernel": size(f"{_MAMBA}.conv_size", 4),
    "use_conv_bias": flag(f"{_MAMBA}.conv_bias", True),
    "use_bias": flag(f"{_MAMBA}.use_bias", False),
    "min_step": number(f"{_MAMBA}.min_step"),
    "max_step": number_or_none(f"{_MAMBA}.max_step"),
    "mamba_hidden_act": Fixed("silu", written=False),
    **free("of rotations, of which there are none", "partial_rotary_factor", "rope_theta"),
    **free("of tensors, which are compared", "expand", "mamba_proj_bias"),
    **free(
      "another way to compute the same",
      "chunk_size",
      "mamba_ssm_cache_dtype",
      "moe_shared_expert_overlap",
      "use_mamba_kernels",
    ),
    **free("the stream here is of `dtype`, equal in float32", "residual_in_fp32"),
    **free("of training", "hidden_dropout"),
    **free("of Mamba-1; Mamba-2 has one step size per head", "time_step_rank"),
    **free(
      "of random parameters",
      "rescale_prenorm_residual",
      "time_step_floor",
      "time_step_max",
      "time_step_min",
    ),
    **free(
      "of experts, of which there are none",
      "moe_intermediate_size",
      "moe_latent_size",
      "moe_shared_expert_intermediate_size",
      "n_group",
      "n_routed_experts",
      "n_shared_experts",
      "norm_topk_prob",
      "num_experts_per_tok",
      "output_router_logits",
      "routed_scaling_factor",
      "topk_group",
    ),
    **free(
      "of heads that predict further tokens, which are left out",
      "mtp_hybrid_override_pattern",
      "mtp_layers_block_type",
      "num_nextn_predict_layers",
    ),
  },
  constants={"norm": "rms", "embedding_norm": False, f"{ATTENTION}.positions": "none"},
  rows={
    "embedding": Row("backbone.embeddings.weight"),
    "head.kernel": Row("lm_head.weight", TRANSPOSED),
  }
  | norm("norm", "backbone.norm_f")
  | norm("blocks.mixer_norm", f"{_LAYER}.norm")
  | norm("blocks.channel_norm", f"{_LAYER}.norm")
  | linears("blocks.channel_mixer", _MIXER, up="up_proj", down="down_proj")
  | linears("blocks.softmax_attention", _MIXER, **QKVO)
  | mamba2("blocks.mamba2", _MIXER),
  normal=_normal,
  written=_written,
  renamed={"attention_head_dim": "head_dim"},
  skipped=r"mtp\..*",
  has=lambda config: not _has_experts(config),
)

_MOE = "channel_mixer_options"

NEMOTRON_H_MOE = dataclasses.replace(
  NEMOTRON_H,
  fields=NEMOTRON_H.fields
  | {
    "moe_intermediate_size": size("channel_hidden", 7688),
    "moe_shared_expert_intermediate_size": size(f"{_MOE}.shared_hidden", 7688),
    "moe_latent_size": size_or_none(f"{_MOE}.latent"),
    "n_routed_experts": size(f"{_MOE}.num_experts", 8),
    "num_experts_per_tok": size(f"{_MOE}.experts_per_token", 2),
    "norm_topk_prob": flag(f"{_MOE}.normalize_weights", True),
    "routed_scaling_factor": number(f"{_MOE}.weight_scale", 1.0),
    "n_group": size(f"{_MOE}.num_groups", 1),
    "topk_group": size(f"{_MOE}.groups_per_token", 1),
    "mlp_bias": Fixed(False),
    **free("of tensors, which are compared", "n_shared_experts"),
    **free("of layers without experts, of which there are none", "intermediate_size"),
    **free("of training", "output_router_logits"),
  },
  constants=NEMOTRON_H.constants
  | {f"{_MOE}.router": "sigmoid", f"{_MOE}.balance_bias": True, f"{_MOE}.gated": False},
  rows={x: row for x, row in NEMOTRON_H.rows.items() if not x.startswith("blocks.channel_mixer")}
  | linear("blocks.channel_mixer.router", f"{_MIXER}.gate")
  | linear("blocks.channel_mixer.latent_down", f"{_MIXER}.fc1_latent_proj")
  | linear("blocks.channel_mixer.latent_up", f"{_MIXER}.fc2_latent_proj")
  | linears(
    "blocks.channel_mixer.shared", f"{_MIXER}.shared_experts", up="up_proj", down="down_proj"
  )
  | {"blocks.channel_mixer.router_bias": Row(f"{_MIXER}.gate.e_score_correction_bias")}
  | experts(_MIXER, up="up_proj", down="down_proj"),
  renamed=NEMOTRON_H.renamed | {"num_local_experts": "n_routed_experts"},
  has=_has_experts,
)
