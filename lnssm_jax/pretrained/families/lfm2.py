"""LFM2 (Liquid AI 2025), of transformers: gated short convolutions, attention, also experts.

Settings and defaults are those of the classes of transformers 4.57 and 5.23; those of the class
with experts are of LFM2-8B-A1B.
"""

import dataclasses

from lnssm_jax.ops.core.checks import is_number
from lnssm_jax.pretrained.families.fields import (
  Config,
  Field,
  Fixed,
  Same,
  count_of_layers,
  flag,
  free,
  number,
  size,
  whole,
  without,
)
from lnssm_jax.pretrained.families.hybrids import (
  CONSTANTS,
  FIELDS,
  by_layers,
  by_pattern,
  of_layers,
  pattern_written,
)
from lnssm_jax.pretrained.families.llama import LAYER, TOP
from lnssm_jax.pretrained.families.table import (
  QKVO,
  Family,
  Row,
  convolution,
  experts,
  linear,
  linears,
  norm,
)
from lnssm_jax.pretrained.manifest import ExportError

_ATTENTION, _CONV = "mixer_options.softmax_attention", "mixer_options.short_conv"
_NAMES = {"full_attention": "full_attention", "conv": "linear_attention"}


def _normal(config: Config) -> Config:
  L, indices = count_of_layers(config), config.pop("full_attn_idxs", None)
  types = config.pop("layer_types", None)
  if types is not None and (
    not isinstance(types, list) or any(x not in _NAMES for x in map(str, types))
  ):
    raise ExportError(f"layer_types={types!r:.80} must be a list of {' and '.join(_NAMES)}.")
  if types is None:
    indices = list(range(L)) if indices is None else indices
    if not isinstance(indices, list) or any(type(x) is not int for x in indices):
      raise ExportError(f"full_attn_idxs={indices!r:.80} must be a list of layers.")
    types = ["full_attention" if i in indices else "conv" for i in range(L)]
  elif indices not in (None, [i for i, x in enumerate(types) if x != "conv"]):
    raise ExportError(
      f"full_attn_idxs={indices!r:.80} is not what layer_types={types!r:.80} says; correct the one"
      " that is wrong."
    )
  if config.get("block_ff_dim") is not None:  # it counts, there
    config["intermediate_size"] = whole(config, "block_ff_dim")
  if (tied := config.get("tie_embedding")) is not None:
    if not isinstance(tied, bool):
      raise ExportError(f"tie_embedding={tied!r:.80} must be bool.")
    config["tie_word_embeddings"] = tied
  config.pop("block_ff_dim", None)
  config.pop("tie_embedding", None)
  config["intermediate_size"] = _width(config)
  rope = config.get("rope_parameters")
  if config.get("rope_theta") is None and not (isinstance(rope, dict) and "rope_theta" in rope):
    config["rope_theta"] = 1e6
  config.setdefault("num_key_value_heads", 8)
  return by_pattern(config, [_NAMES[x] for x in types], "short_conv", 1.0, 128_000)


def _width(config: Config) -> int:
  """The width of the MLP, which the config scales and rounds."""
  width = whole(config, "intermediate_size", 12288)
  factor, unit = config.pop("block_ffn_dim_multiplier", 1.0), config.pop("block_multiple_of", 256)
  adjusts = config.pop("block_auto_adjust_ff_dim", True)
  if not isinstance(adjusts, bool) or type(unit) is not int or unit < 1:
    raise ExportError(
      f"block_auto_adjust_ff_dim={adjusts!r:.80} must be a boolean and"
      f" block_multiple_of={unit!r:.80} a number above 0."
    )
  if not adjusts:
    return width
  width = 2 * width // 3
  if factor is None:
    return width
  if not is_number(factor) or not 0 < factor < 2**16:
    raise ExportError(f"block_ffn_dim_multiplier={factor!r:.80} must be a number above 0.")
  return unit * -(-int(factor * width) // unit)


def _written(config: Config) -> Config:
  config, types = pattern_written(config)
  names = {theirs: name for name, theirs in _NAMES.items()}
  own = {"block_auto_adjust_ff_dim": False, "layer_types": [names[x] for x in types]}
  del config["partial_rotary_factor"]
  return config | own


LFM2 = Family(
  name="lfm2",
  layout="hf",
  architecture="Lfm2ForCausalLM",
  fields=without(FIELDS, "attention_bias", "attention_dropout")
  | {
    "norm_eps": number(("norm_eps", f"{_ATTENTION}.norm_eps"), 1e-5),
    "tie_word_embeddings": flag("tie_embeddings", True),
    "hidden_act": Fixed("silu", written=False),
    "conv_L_cache": size(f"{_CONV}.conv_size", 3),
    "conv_bias": flag((f"{_CONV}.use_bias", f"{_CONV}.conv_bias"), False),
    "block_dim": Same("hidden_size", lambda config: config["hidden_size"]),
    "conv_dim": Same("hidden_size", lambda config: config["hidden_size"]),
    "conv_dim_out": Same("hidden_size", lambda config: config["hidden_size"]),
    "num_heads": Same("num_attention_heads", lambda config: config["num_attention_heads"]),
    "block_norm_eps": Same("norm_eps", lambda config: config.get("norm_eps", 1e-5)),
    "block_use_swiglu": Fixed(True, written=False),
    "use_pos_enc": Fixed(True, written=False),
    **free(
      "of random parameters",
      "block_mlp_init_scale",
      "block_out_init_scale",
      "block_use_xavier_init",
      "conv_use_xavier_init",
    ),
  },
  constants={"norm": "rms", f"{_ATTENTION}.qk_norm": True, **CONSTANTS},
  rows={x: row for x, row in TOP.items() if not x.startswith("norm")}
  | norm("norm", "model.embedding_norm")
  | norm("blocks.mixer_norm", f"{LAYER}.operator_norm")
  | norm("blocks.channel_norm", f"{LAYER}.ffn_norm")
  | linears("blocks.channel_mixer", f"{LAYER}.feed_forward", gate="w1", up="w3", down="w2")
  | linears("blocks.softmax_attention", f"{LAYER}.self_attn", **QKVO | {"o_proj": "out_proj"})
  | norm("blocks.softmax_attention.q_norm", f"{LAYER}.self_attn.q_layernorm")
  | norm("blocks.softmax_attention.k_norm", f"{LAYER}.self_attn.k_layernorm")
  | linears("blocks.short_conv", f"{LAYER}.conv", in_proj="in_proj", o_proj="out_proj")
  | convolution("blocks.short_conv.conv", f"{LAYER}.conv.conv"),
  normal=_normal,
  written=_written,
)


_DENSE, _MOE = "channel_mixer_options.swiglu", "channel_mixer_options.moe"
_EXPERTS = f"{LAYER}.feed_forward"


def _with_experts(config: Config) -> Config:
  L, dense = count_of_layers(config), config.pop("num_dense_layers", 2)
  if type(dense) is not int or not 0 <= dense <= L:
    raise ExportError(f"num_dense_layers={dense!r:.80} must be at most num_hidden_layers={L}.")
  own = {"block_auto_adjust_ff_dim": False}
  config = _normal({"intermediate_size": 7168} | config | own)
  mixers = of_layers(config, "mixers")
  return by_layers(config, mixers, ["swiglu"] * dense + ["moe"] * (L - dense))


def _with_experts_written(config: Config) -> Config:
  dense = of_layers(config, "channel_mixers").count("swiglu")
  del config["channel_mixers"]
  config = _written(config) | {"num_dense_layers": dense}
  del config["block_auto_adjust_ff_dim"]
  return config


_OF_DENSE = ("block_use_swiglu", "block_mlp_init_scale", "block_out_init_scale")

LFM2_MOE = dataclasses.replace(
  LFM2,
  name="lfm2_moe",
  architecture="Lfm2MoeForCausalLM",
  fields=without(LFM2.fields, *_OF_DENSE)
  | {
    "channel_mixers": Field("channel_mixer", (list,)),
    "intermediate_size": size(f"{_DENSE}.hidden"),
    "hidden_act": Fixed("silu", written=False),
    "moe_intermediate_size": size(f"{_MOE}.hidden", 1792),
    "num_experts": size(f"{_MOE}.num_experts", 32),
    "num_experts_per_tok": size(f"{_MOE}.experts_per_token", 4),
    "use_expert_bias": flag(f"{_MOE}.balance_bias", True),
    "norm_topk_prob": flag(f"{_MOE}.normalize_weights", True),
    "routed_scaling_factor": number(f"{_MOE}.weight_scale", 1.0),
    **free("of training", "output_router_logits"),
  },
  constants=LFM2.constants | {f"{_MOE}.router": "sigmoid", f"{_MOE}.weight_eps": 1e-6},
  rows=LFM2.rows
  | linear("blocks.channel_mixer.router", f"{_EXPERTS}.gate")
  | {"blocks.channel_mixer.router_bias": Row(f"{_EXPERTS}.expert_bias")}
  | experts(_EXPERTS, gate="w1", up="w3", down="w2"),
  normal=_with_experts,
  written=_with_experts_written,
)
