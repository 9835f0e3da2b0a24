"""Ling 3.0 (Inclusion AI 2026, bailing_hybrid), of transformers: Kimi Linear with rotations.

Its decays and gates of KDA are of one matrix each, latent attention rotates channels in neighboring
pairs and has a gate per head, and experts are in groups. Settings, defaults and the names of
tensors are those of transformers 5.23. Lightning attention of Ling 2.x is another family.
"""

import dataclasses

from lnssm_jax.pretrained.families.fields import (
  Config,
  Fixed,
  Same,
  count_of_layers,
  free,
  number,
  number_or_none,
  size,
  whole,
)
from lnssm_jax.pretrained.families.hybrids import ATTENTION
from lnssm_jax.pretrained.families.kimi_linear import (
  KIMI_LINEAR,
  kda,
  kimi_linear,
  kimi_linear_written,
  latent_attention,
)
from lnssm_jax.pretrained.families.llama import LAYER, TOP, rotary
from lnssm_jax.pretrained.families.table import Row, experts, linear, linears
from lnssm_jax.pretrained.manifest import ExportError

_KDA, _MOE = "mixer_options.kda", "channel_mixer_options.moe"
_MIXER, _MLP = f"{LAYER}.attention", f"{LAYER}.mlp"
_PARTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_USUAL = {"num_attention_heads": 32, "head_dim": 128, "first_k_dense_replace": 2}
_USUAL |= {"moe_intermediate_size": 768, "model_max_length": 262144}


def _normal(config: Config) -> Config:
  config = {x: v for x, v in _USUAL.items() if x not in config} | config
  L, every = count_of_layers(config), whole(config, "layer_group_size", 6)
  config.pop("layer_group_size", None)
  if config.get("layer_types") is None:
    kinds = ("linear_attention", "full_attention")
    config["layer_types"] = [kinds[(i + 1) % every == 0] for i in range(L)]
  usual = {
    "linear_head_dim": config.pop("head_dim"),
    "linear_conv_kernel_dim": config.pop("short_conv_kernel_size", 4),
  }
  safe, bound = config.pop("kda_safe_gate", True), config.pop("kda_lower_bound", -5.0)
  if not isinstance(safe, bool):
    raise ExportError(f"kda_safe_gate={safe!r:.80} must be bool.")
  if not isinstance(bound, float):
    raise ExportError(f"kda_lower_bound={bound!r:.80} must be a float.")
  config = rotary(kimi_linear(usual | config), usual_length=262144, default=6e6)
  return config | {"lower_bound": bound if safe else None}


def _written(config: Config) -> Config:
  bound = config.pop("lower_bound")
  config = kimi_linear_written(config | {"linear_num_heads": config["num_attention_heads"]})
  of_kda = config.pop("linear_attn_config")
  full = of_kda["full_attn_layers"]
  types = ["linear_attention", "full_attention"]
  written = {
    "layer_types": [types[i + 1 in full] for i in range(config["num_hidden_layers"])],
    "head_dim": of_kda["head_dim"],
    "short_conv_kernel_size": of_kda["short_conv_kernel_size"],
    "kda_safe_gate": bound is not None,
    "kda_lower_bound": -5.0 if bound is None else bound,
  }
  return config | written


_NOT_THERE = ("q_lora_rank", "mla_use_nope", "moe_router_activation_func", "head_dim")
_NOT_THERE += ("num_nextn_predict_layers", "rope_parameters", "linear_num_heads")

LING = dataclasses.replace(
  KIMI_LINEAR,
  name="bailing_hybrid",
  architecture="BailingHybridForCausalLM",
  fields={x: field for x, field in KIMI_LINEAR.fields.items() if x not in _NOT_THERE}
  | {
    "rms_norm_eps": number(("norm_eps", f"{_KDA}.norm_eps"), 1e-6),
    "intermediate_size": size("channel_mixer_options.swiglu.hidden", 6144),
    "num_attention_heads": size((f"{ATTENTION}.num_heads", f"{_KDA}.num_heads", "num_heads")),
    "linear_num_heads": Same("num_attention_heads", lambda config: config["num_attention_heads"]),
    "model_max_length": size(f"{ATTENTION}.max_length"),
    "moe_intermediate_size": size(f"{_MOE}.hidden"),
    "num_experts": size(f"{_MOE}.num_experts", 512),
    "routed_scaling_factor": number(f"{_MOE}.weight_scale", 2.5),
    "num_expert_group": size(f"{_MOE}.num_groups", 8),
    "topk_group": size(f"{_MOE}.groups_per_token", 4),
    "lower_bound": number_or_none(f"{_KDA}.lower_bound"),
    "rope_theta": number(f"{ATTENTION}.rotary_base"),
    "rope_scaling": Fixed(None, written=False),
    **free(
      "of heads that predict further tokens, which are left out",
      "mtp_loss_scaling_factor",
      "num_nextn_predict_layers",
    ),
  },
  constants={x: v for x, v in KIMI_LINEAR.constants.items() if x != f"{ATTENTION}.positions"}
  | {f"{_KDA}.full_gates": True, f"{ATTENTION}.use_gate": "heads"},
  rows={x: row for x, row in TOP.items() if x != "embedding"}
  | {
    x: row
    for x, row in KIMI_LINEAR.rows.items()
    if x.startswith(("blocks.mixer_norm", "blocks.channel_norm"))
  }
  | {"embedding": Row("model.word_embeddings.weight")}
  | linears("blocks.kda", _MIXER, o_proj="dense", gate_up_proj="g_proj", decay_up_proj="f_proj")
  | kda(_MIXER)
  | {"blocks.kda.log_rate": Row(f"{_MIXER}.A_log")}
  | latent_attention(_MIXER, pairs=True)
  | linears("blocks.softmax_attention", _MIXER, o_proj="dense", g_proj="g_proj")
  | linears("blocks.channel_mixer", _MLP, **_PARTS)
  | linears("blocks.channel_mixer.shared", f"{_MLP}.shared_experts", **_PARTS)
  | linear("blocks.channel_mixer.router", f"{_MLP}.gate")
  | {"blocks.channel_mixer.router_bias": Row(f"{_MLP}.gate.expert_bias")}
  | experts(_MLP, **_PARTS),
  normal=_normal,
  written=_written,
  renamed=KIMI_LINEAR.renamed | {"num_mtp_layers": "num_nextn_predict_layers"},
  skipped=r"model\.layers\.(FURTHER)\..*",
  older_tensors={},
)
