"""Jamba (AI21 2024), of transformers: Mamba, attention without positions, experts in some layers.

Settings are those of Jamba 1.5 Mini's file, and with their defaults of the classes of transformers
4.40 and 5.23. Models with one expert (Jamba Reasoning 3B) have an MLP in its place.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from lnssm_jax.pretrained.families.fields import (
  Config,
  Field,
  Fixed,
  choice,
  count_of_layers,
  flag,
  free,
  number,
  size,
  whole,
  without,
)
from lnssm_jax.pretrained.families.hybrids import ATTENTION, by_layers, of_layers, pattern
from lnssm_jax.pretrained.families.llama import LAYER, SILU, SIZES, TOP, whole_heads
from lnssm_jax.pretrained.families.table import (
  GATED_MLP,
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

_MAMBA, _CHANNEL = "mixer_options.mamba", "channel_mixer_options"
_MIXER, _MLP = f"{LAYER}.mamba", f"{LAYER}.feed_forward"


def _every(config: Config, name: str, period: int, offset: int) -> list[bool]:
  """Whether a layer is one of those that `period` and `offset` of `name` count; removes them."""
  n = whole(config, f"{name}_layer_period", period)
  first = config.pop(f"{name}_layer_offset", offset)
  config.pop(f"{name}_layer_period", None)
  if type(first) is not int or not 0 <= first < n:
    raise ExportError(f"{name}_layer_offset={first!r:.80} must be below {name}_layer_period={n}.")
  return [i % n == first for i in range(count_of_layers(config))]


def _every_written(name: str, of_kind: list[bool]) -> Config:
  """The inverse of `_every`."""
  layers = [i for i, x in enumerate(of_kind) if x] or [len(of_kind)]
  period = layers[1] - layers[0] if len(layers) > 1 else len(of_kind) + 1
  return {f"{name}_layer_period": period, f"{name}_layer_offset": layers[0]}


def _mixers(config: Config) -> tuple[Config, list[str]]:
  config = whole_heads({"num_key_value_heads": 8, "num_attention_heads": 32} | config)
  if config.get("mamba_dt_rank", "auto") == "auto":
    config["mamba_dt_rank"] = math.ceil(whole(config, "hidden_size") / 16)
  attention = _every(config, "attn", 8, 4)
  return config, ["softmax_attention" if x else "mamba" for x in attention]


def _with_experts(config: Config) -> Config:
  config, mixers = _mixers(config)
  return by_layers(
    config, mixers, ["moe" if x else "swiglu" for x in _every(config, "expert", 2, 1)]
  )


def _dense(config: Config) -> Config:
  config, mixers = _mixers(config)
  _every(config, "expert", 2, 1)
  if len(set(mixers)) < 2:
    raise ExportError(f"all layers are {mixers[0]}; only models with attention are implemented.")
  return config | {"mixers": pattern(mixers)}


def _written(config: Config) -> Config:
  attention = [x == "softmax_attention" for x in of_layers(config, "mixers")]
  written = _every_written("attn", attention)
  if "channel_mixers" in config:
    written |= _every_written("expert", [x == "moe" for x in of_layers(config, "channel_mixers")])
  return without(config, "mixers", "channel_mixers") | written


def _has_experts(config: Mapping[str, Any]) -> bool:
  return config.get("num_experts", config.get("num_local_experts", 16)) != 1


JAMBA_DENSE = Family(
  name="jamba",
  layout="hf",
  architecture="JambaForCausalLM",
  fields=SIZES
  | {
    "mixers": Field("mixer", (list,)),
    "intermediate_size": size("channel_hidden", 14336),
    "hidden_act": choice(f"{_CHANNEL}.activation", SILU, "silu"),
    "rms_norm_eps": number(("norm_eps", f"{_MAMBA}.norm_eps"), 1e-6),
    "tie_word_embeddings": flag("tie_embeddings", False),
    "num_attention_heads": size((f"{ATTENTION}.num_heads", "num_heads")),
    "num_key_value_heads": size(f"{ATTENTION}.num_kv_heads"),
    "max_position_embeddings": size(f"{ATTENTION}.max_length", 262144),
    "attention_dropout": number(f"{ATTENTION}.attention_dropout", 0.0),
    "sliding_window": Fixed(None, written=False),
    "mamba_d_state": size(f"{_MAMBA}.state_dim", 16),
    "mamba_d_conv": size(f"{_MAMBA}.conv_size", 4),
    "mamba_expand": size(f"{_MAMBA}.expand", 2),
    "mamba_dt_rank": size(f"{_MAMBA}.gate_rank"),
    "mamba_conv_bias": flag(f"{_MAMBA}.conv_bias", True),
    "mamba_proj_bias": flag(f"{_MAMBA}.use_bias", False),
    "mamba_inner_layernorms": Fixed(True, written=False),
    "num_experts": Fixed(1),
    **free("of experts, of which there are none", "num_experts_per_tok"),
    **free("of training", "output_router_logits", "router_aux_loss_coef"),
    **free("of training data; attention has no positions", "n_ctx"),
    **free("of the call and of its outputs", "calc_logits_for_entire_prompt"),
    **free(
      "another way to compute the same", "use_associative_scan", "use_mamba_kernels", "use_mambapy"
    ),
  },
  constants={
    "norm": "rms",
    "channel_mixer": "swiglu",
    "embedding_norm": False,
    f"{_MAMBA}.inner_norm": "scaled_rms",
    f"{ATTENTION}.positions": "none",
  },
  rows={x: row for x, row in TOP.items() if not x.startswith("norm")}
  | norm("norm", "model.final_layernorm")
  | norm("blocks.mixer_norm", f"{LAYER}.input_layernorm")
  | norm("blocks.channel_norm", f"{LAYER}.pre_ff_layernorm")
  | linears("blocks.channel_mixer", _MLP, **GATED_MLP)
  | linears("blocks.softmax_attention", f"{LAYER}.self_attn", **QKVO)
  | linears(
    "blocks.mamba", _MIXER, in_proj="in_proj", x_proj="x_proj", dt_proj="dt_proj", o_proj="out_proj"
  )
  | convolution("blocks.mamba.conv", f"{_MIXER}.conv1d")
  | norm("blocks.mamba.r_norm", f"{_MIXER}.dt_layernorm")
  | norm("blocks.mamba.b_norm", f"{_MIXER}.b_layernorm")
  | norm("blocks.mamba.c_norm", f"{_MIXER}.c_layernorm")
  | {"blocks.mamba.skip": Row(f"{_MIXER}.D"), "blocks.mamba.a_log": Row(f"{_MIXER}.A_log")},
  normal=_dense,
  written=_written,
  renamed={"num_local_experts": "num_experts"},
  has=lambda config: not _has_experts(config),
)
JAMBA = dataclasses.replace(
  JAMBA_DENSE,
  fields=JAMBA_DENSE.fields
  | {
    "channel_mixers": Field("channel_mixer", (list,)),
    "intermediate_size": size((f"{_CHANNEL}.swiglu.hidden", f"{_CHANNEL}.moe.hidden"), 14336),
    "hidden_act": choice(
      (f"{_CHANNEL}.swiglu.activation", f"{_CHANNEL}.moe.activation"), SILU, "silu"
    ),
    "num_experts": size(f"{_CHANNEL}.moe.num_experts", 16),
    "num_experts_per_tok": size(f"{_CHANNEL}.moe.experts_per_token", 2),
  },
  constants=without(JAMBA_DENSE.constants, "channel_mixer")
  | {f"{_CHANNEL}.moe.normalize_weights": False},
  rows=JAMBA_DENSE.rows
  | linear("blocks.channel_mixer.router", f"{_MLP}.router")
  | experts(_MLP, **GATED_MLP),
  normal=_with_experts,
  has=_has_experts,
)
