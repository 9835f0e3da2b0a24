"""Ling 3.0 (Inclusion AI 2026, bailing_hybrid), of transformers: Kimi Linear with rotations.

Its decays and gates of KDA are of one matrix each, latent attention rotates channels in neighboring
pairs and has a gate per head, and experts are in groups. Settings and the names of tensors are
those of the published files; transformers 5.23, whose defaults these are, has no low-rank queries
and saves W_o of KDA by the name of attention's. Lightning attention of Ling 2.x is another family.
"""

import dataclasses
from typing import Any

from lnssm_jax.ops.core.checks import is_number
from lnssm_jax.pretrained.families.fields import (
  Config,
  Field,
  Fixed,
  Same,
  agree,
  count_of_layers,
  free,
  number,
  number_or_none,
  same,
  size,
  whole,
  without,
)
from lnssm_jax.pretrained.families.hybrids import ATTENTION, of_layers, pattern
from lnssm_jax.pretrained.families.kimi_linear import (
  KIMI_LINEAR,
  kda,
  kimi_linear,
  kimi_linear_written,
  latent_attention,
)
from lnssm_jax.pretrained.families.llama import LAYER, TOP, rotary
from lnssm_jax.pretrained.families.table import GATED_MLP, Row, experts, linear, linears
from lnssm_jax.pretrained.manifest import ExportError

_KDA, _MOE = "mixer_options.kda", "channel_mixer_options.moe"
_MIXER, _MLP = f"{LAYER}.attention", f"{LAYER}.mlp"
_USUAL = {"num_attention_heads": 32, "head_dim": 128, "first_k_dense_replace": 2}
_USUAL |= {"moe_intermediate_size": 768, "model_max_length": 262144}
_LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
_FIXED = {"gated_attention_proj_granularity_type": "head_wise", "linear_attention": "kda"}
_FIXED |= {"score_function": "sigmoid", "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_FIXED |= {"group_norm_size": 1, "num_kv_heads_for_linear_attn": 0}
_FIXED |= dict.fromkeys(("linear_silu", "moe_router_enable_expert_bias", "no_kda_lora"), True)
_FIXED |= dict.fromkeys(("rope_interleave", "use_qk_norm"), True)
_FIXED |= dict.fromkeys(("scale_router_input", "up_proj_norm", "use_bias", "use_kda_lora"), False)
_FIXED |= dict.fromkeys(("use_mla_nope", "use_nGPT", "use_qkv_bias", "value_norm"), False)


def _normal(config: Config) -> Config:
  if "V2" in str(config.get("architectures", "")):
    raise ExportError(
      f"architectures={config['architectures']!r:.80}: Ling 2.5 and 2.6, which have this model_type"
      " too, are not implemented (lightning attention)."
    )
  config = _USUAL | config
  L, every = count_of_layers(config), whole(config, "layer_group_size", 6)
  config.pop("layer_group_size", None)
  if config.get("layer_types") is None:
    kinds = ("linear_attention", "full_attention")
    config["layer_types"] = [kinds[(i + 1) % every == 0] for i in range(L)]
  usual = {
    "linear_head_dim": whole(config, "head_dim"),
    "linear_conv_kernel_dim": whole(config, "short_conv_kernel_size", 4),
  }
  config = without(config, "head_dim", "short_conv_kernel_size")
  safe, bound = config.pop("kda_safe_gate", True), config.pop("kda_lower_bound", -5.0)
  if not isinstance(safe, bool):
    raise ExportError(f"kda_safe_gate={safe!r:.80} must be bool.")
  if not is_number(bound):
    raise ExportError(f"kda_lower_bound={bound!r:.80} must be a number.")
  limits = {name: _limits(name, config.pop(name, None), L) for name in _LIMITS}
  # Of KDA; in files of transformers 5.23, which writes it, head_dim is the width of the rotation.
  width = whole(usual | config, "linear_head_dim")
  config = kimi_linear(usual | config)
  if bounded := {name: x for name, x in limits.items() if x is not None}:
    # Layers of one place in a pattern have one bound.
    columns = [of_layers(config, x) for x in ("mixers", "channel_mixers")]
    rows = pattern([*zip(*columns, *bounded.values(), strict=True)])
    config |= {"mixers": [row[0] for row in rows], "channel_mixers": [row[1] for row in rows]}
  config |= limits
  rotated = config["qk_rope_head_dim"]
  agree(config, "rotary_dim", rotated, "qk_rope_head_dim")
  share = rotated / width
  agree(config, "partial_rotary_factor", share, "qk_rope_head_dim / head_dim")
  for name in ("rope_parameters", "rope_scaling"):
    if isinstance(rope := config.get(name), dict):
      agree(rope := dict(rope), "partial_rotary_factor", share, "qk_rope_head_dim / head_dim")
      config[name] = rope
  config = rotary(config, usual_length=262144, default=6e6)
  return config | {"lower_bound": float(bound) if safe else None}


def _limits(name: str, limits: Any, L: int) -> list[float] | None:
  """The bounds of activations in each layer, 0 for none; None if there are none."""
  limits = [] if limits is None else limits
  if not isinstance(limits, list) or not all(is_number(x) and x >= 0 for x in limits):
    raise ExportError(f"{name}={limits!r:.80} must be a list of numbers, 0 or more.")
  if any(limits) and len(limits) != L:
    raise ExportError(f"{name} has {len(limits)} numbers, but num_hidden_layers={L}.")
  return limits if any(limits) else None


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


_NOT_THERE = ("mla_use_nope", "moe_router_activation_func", "head_dim")
_NOT_THERE += ("num_nextn_predict_layers", "rope_parameters", "linear_num_heads")

LING = dataclasses.replace(
  KIMI_LINEAR,
  name="bailing_hybrid",
  architecture="BailingHybridForCausalLM",
  fields=without(KIMI_LINEAR.fields, *_NOT_THERE)
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
    **{
      name: Field(f"{_MOE}.{ours}", (list, type(None)), None)
      for name, ours in zip(_LIMITS, ("limit", "shared_limit"), strict=True)
    },
    "lower_bound": number_or_none(f"{_KDA}.lower_bound"),
    "rope_theta": number(f"{ATTENTION}.rotary_base"),
    "rope_scaling": Fixed(None, written=False),
    "moe_shared_expert_intermediate_size": same("moe_intermediate_size"),
    **{name: Fixed(value, written=False) for name, value in _FIXED.items()},
    **free("of a window, which is not used", "max_window_layers"),
    **free("of training", "embedding_dropout", "output_dropout", "seq_aux"),
    **free("another way to compute the same", "router_dtype"),
    **free(
      "of heads that predict further tokens, which are left out",
      "mtp_loss_scaling_factor",
      "mtp_use_kda",
      "num_nextn_predict_layers",
    ),
  },
  constants=without(KIMI_LINEAR.constants, f"{ATTENTION}.positions")
  | {f"{_KDA}.full_gates": True, f"{ATTENTION}.use_gate": "heads"},
  rows=without(TOP, "embedding")
  | {
    x: row
    for x, row in KIMI_LINEAR.rows.items()
    if x.startswith(("blocks.mixer_norm", "blocks.channel_norm"))
  }
  | {"embedding": Row("model.word_embeddings.weight")}
  | linears("blocks.kda", _MIXER, o_proj="o_proj", gate_up_proj="g_proj", decay_up_proj="f_proj")
  | kda(_MIXER)
  | {"blocks.kda.log_rate": Row(f"{_MIXER}.A_log")}
  | latent_attention(_MIXER, pairs=True)
  | linears("blocks.softmax_attention", _MIXER, o_proj="dense", g_proj="g_proj")
  | linears("blocks.channel_mixer", _MLP, **GATED_MLP)
  | linears("blocks.channel_mixer.shared", f"{_MLP}.shared_experts", **GATED_MLP)
  | linear("blocks.channel_mixer.router", f"{_MLP}.gate")
  | {"blocks.channel_mixer.router_bias": Row(f"{_MLP}.gate.expert_bias")}
  | experts(_MLP, **GATED_MLP),
  normal=_normal,
  written=_written,
  renamed=KIMI_LINEAR.renamed | {"num_mtp_layers": "num_nextn_predict_layers"},
  skipped=r"model\.layers\.(FURTHER)\..*",
  older_tensors={},
  other_rows=linear("blocks.kda.o_proj", f"{_MIXER}.dense"),
)
