"""Olmo-Hybrid (Ai2 2026), of transformers: norms stand after attention, and before gated DeltaNet.

Its code reads files with the names below; those that transformers 5.23 saves itself have others,
and convolutions cut elsewhere.
"""

from lnssm_jax.pretrained.families.fields import (
  Config,
  Field,
  count_of_layers,
  flag,
  free,
  number,
  size,
  whole,
)
from lnssm_jax.pretrained.families.hybrids import (
  ATTENTION,
  CONSTANTS,
  FIELDS,
  by_pattern,
  pattern_written,
)
from lnssm_jax.pretrained.families.llama import LAYER, LLAMA, TOP
from lnssm_jax.pretrained.families.table import (
  TRANSPOSED,
  Family,
  Row,
  convolution,
  joined,
  linears,
  norm,
)
from lnssm_jax.pretrained.manifest import ExportError

_DELTA, _NET = "mixer_options.gated_delta_net", f"{LAYER}.linear_attn"
_PLACES = {"gated_delta_net": "before", "softmax_attention": "after"}


def _normal(config: Config) -> Config:
  L, types = count_of_layers(config), config.pop("layer_types", None)
  if types is None:
    types = ["linear_attention" if i % 4 != 3 else "full_attention" for i in range(L)]
    types = types if L > 3 else [*types[:-1], "full_attention"]
  if not isinstance(types, list):
    raise ExportError(f"layer_types={types!r:.80} must be a list.")
  rope = config.get("rope_parameters")
  given = rope if isinstance(rope, dict) and "rope_theta" in rope else config
  # Null in published files, which transformers up to 5.8 reads as none.
  missing = "rope_parameters" not in config or rope is not None
  turns = missing if "rope_theta" not in given else given["rope_theta"] is not None
  if not turns:
    for name in ("rope_parameters", "rope_theta"):
      config.pop(name, None)
  H, D = whole(config, "num_attention_heads"), whole(config, "hidden_size")
  for name in ("num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"):
    config[name] = H if config.get(name) is None else config[name]
  if config.get("linear_key_head_dim") is None:
    config["linear_key_head_dim"] = int(0.75 * D / whole(config, "linear_num_key_heads"))
  K = whole(config, "linear_key_head_dim")
  values = config.pop("linear_value_head_dim", None)
  V = 2 * K if values is None else whole({"linear_value_head_dim": values}, "linear_value_head_dim")
  config = by_pattern(config, types, "gated_delta_net", 1.0, 65536)
  places = [_PLACES[x] for x in config["mixers"]]
  return config | {"places": places, "positions": "rotary" if turns else "none", "expand_v": V / K}


def _written(config: Config) -> Config:
  V = round(config["expand_v"] * config["linear_key_head_dim"])
  theta = {"rope_theta": None} if config["positions"] == "none" else {}
  ours = ("expand_v", "head_dim", "places", "positions")
  config, types = pattern_written(config, *ours)
  del config["partial_rotary_factor"]
  return config | {"linear_value_head_dim": V, "layer_types": types} | theta


def _norms(mixer: str, first: str, second: str):
  own = f"blocks.{mixer}"
  return norm(f"{own}.mixer_norm", f"{LAYER}.{first}") | norm(
    f"{own}.channel_norm", f"{LAYER}.{second}"
  )


OLMO_HYBRID = Family(
  name="olmo_hybrid",
  layout="hf",
  architecture="OlmoHybridForCausalLM",
  fields=FIELDS
  | {
    "rms_norm_eps": number(("norm_eps", f"{ATTENTION}.norm_eps"), 1e-6),
    "places": Field("norm_place", (list,)),
    "positions": Field(f"{ATTENTION}.positions", (str,)),
    "linear_num_key_heads": size(f"{_DELTA}.num_heads"),
    "linear_num_value_heads": size(f"{_DELTA}.num_value_heads"),
    "linear_key_head_dim": size(f"{_DELTA}.head_dim"),
    "expand_v": number(f"{_DELTA}.expand_v"),
    "linear_conv_kernel_dim": size(f"{_DELTA}.conv_size", 4),
    "linear_allow_neg_eigval": flag(f"{_DELTA}.allow_neg_eigval", True),
    **free(
      "of random parameters",
      "linear_a_log_max",
      "linear_a_log_min",
      "linear_dt_init_floor",
      "linear_dt_max",
      "linear_dt_min",
    ),
  },
  constants={
    "norm": "rms",
    f"{ATTENTION}.qk_norm": "rms_of_all",
    f"{_DELTA}.norm_eps": 1e-5,  # whatever rms_norm_eps says
    **CONSTANTS,
  },
  rows=TOP
  | _norms("gated_delta_net", "attention_layer_norm", "feedforward_layer_norm")
  | _norms("softmax_attention", "post_attention_layernorm", "post_feedforward_layernorm")
  | {x: row for x, row in LLAMA.rows.items() if x.startswith("blocks.channel_mixer")}
  | {
    x.replace("blocks.mixer", "blocks.softmax_attention"): row
    for x, row in LLAMA.rows.items()
    if x.startswith("blocks.mixer.")
  }
  | norm("blocks.softmax_attention.q_norm", f"{LAYER}.self_attn.q_norm")
  | norm("blocks.softmax_attention.k_norm", f"{LAYER}.self_attn.k_norm")
  | joined(convolution(f"blocks.gated_delta_net.{x}_conv", f"{_NET}.{x}_conv1d") for x in "qkv")
  | linears("blocks.gated_delta_net", _NET, **{f"{x}_proj": f"{x}_proj" for x in "qkvgbo"})
  | norm("blocks.gated_delta_net.norm", f"{_NET}.o_norm")
  | {
    "blocks.gated_delta_net.a_proj.kernel": Row(f"{_NET}.a_proj.weight", TRANSPOSED),
    "blocks.gated_delta_net.a_proj.bias": Row(f"{_NET}.dt_bias"),
    "blocks.gated_delta_net.log_rate": Row(f"{_NET}.A_log"),
  },
  normal=_normal,
  written=_written,
)
