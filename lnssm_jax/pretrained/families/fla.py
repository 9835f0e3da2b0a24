"""The models of flash-linear-attention (fla 0.6.0)."""

import functools

from lnssm_jax.pretrained.families.rwkv6 import rwkv6_rows
from lnssm_jax.pretrained.families.table import (
  TRANSPOSED,
  Config,
  Family,
  Field,
  Fixed,
  Row,
  Rows,
  choice,
  convolution,
  flag,
  free,
  joined,
  linear,
  linears,
  norm,
  number,
  size,
  size_or_none,
)
from lnssm_jax.pretrained.manifest import ExportError

LAYER = "model.layers.{}"
ATTN = f"{LAYER}.attn"
SILU = {"swish": "silu", "silu": "silu"}
QKVO = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "o_proj"}
ONE = Fixed(1.0, 1)

_FIELDS = {
  "vocab_size": size("vocab_size"),
  "hidden_size": size("dim"),
  "num_hidden_layers": size("num_layers"),
  "num_heads": size("num_heads"),
  "intermediate_size": size("channel_hidden"),
  "norm_eps": number(("norm_eps", "mixer_options.norm_eps"), 1e-6),
  "tie_word_embeddings": flag("tie_embeddings", False),
  "attn": Fixed(None),
  "hidden_ratio": Fixed(None),
  "fuse_norm": Fixed(True),  # without, norms have other names
  **free(
    "attn_mode",
    "fuse_cross_entropy",
    "fuse_linear_cross_entropy",
    "use_l2warp",
    "max_position_embeddings",
  ),
}
# Of models with a gated MLP, which are all but RWKV.
_GATED = _FIELDS | {
  "hidden_act": choice("channel_mixer_options.activation", SILU, "swish"),
  "attnres_block_size": Fixed(None),
  **free("fuse_swiglu"),
}
_EPS_OF_BLOCKS = {"norm_eps": number("norm_eps", 1e-6)}
_KV_HEADS = {"num_kv_heads": size("mixer_options.num_kv_heads")}
_CONVOLVED = {"conv_size": size_or_none("mixer_options.conv_size")}
_PLAIN = {"use_short_conv": Fixed(False), "elementwise_affine": Fixed(True), **free("conv_size")}

_ENDS: Rows = {
  "embedding": Row("model.embeddings.weight"),
  "head.kernel": Row("lm_head.weight", TRANSPOSED),
  **norm("norm", "model.norm"),
  **norm("blocks.mixer_norm", f"{LAYER}.attn_norm"),
}
_MLP: Rows = {
  **norm("blocks.channel_norm", f"{LAYER}.mlp_norm"),
  **linears(
    "blocks.channel_mixer", f"{LAYER}.mlp", gate="gate_proj", up="up_proj", down="down_proj"
  ),
}
_CONVOLUTIONS = joined(
  convolution(f"blocks.mixer.{x}_conv", f"{ATTN}.{x}_conv1d") for x in ("q", "k", "v")
)


def _normal(
  config: Config, *, share: float = 4 * 2 / 3, multiple: int = 256, convolved: bool | None = None
) -> Config:
  """Writes out widths and groups, and conv_size=None where there are no convolutions.

  Args:
    share, multiple: the MLP is share D wide by default, rounded up to a multiple.
    convolved: the default of use_short_conv, where it can be chosen.
  """
  dim, given = config.get("hidden_size"), config.pop("hidden_ratio", None)
  if type(dim) is not int or dim < 1:
    raise ExportError(f"hidden_size={dim!r} must be a positive whole number.")
  if config.get("intermediate_size") is None:
    if given is not None:
      if type(given) not in (int, float) or not 0 < given < 1000:
        raise ExportError(f"hidden_ratio={given!r:.80} must be a number.")
      share = given * 2 / 3 if multiple == 256 else given
    config["intermediate_size"] = multiple * -(-int(dim * share) // multiple)
  if config.get("num_kv_heads", 0) is None:
    config["num_kv_heads"] = config.get("num_heads")
  if convolved is not None:
    config.setdefault("conv_size", 4)
    if not _boolean(config, "use_short_conv", convolved):
      config["conv_size"] = None
  return config


def _boolean(config: Config, name: str, default: bool) -> bool:
  value = config.pop(name, default)
  if type(value) is not bool:
    raise ExportError(f"{name}={value!r:.80} must be true or false.")
  return value


def _with_convolutions(config: Config) -> Config:
  size = config["conv_size"]
  return config | {"use_short_conv": size is not None, "conv_size": size or 4}


def _family(
  name: str,
  architecture: str,
  mixer: str,
  fields: dict,
  rows: Rows,
  *,
  convolved: bool | None = None,
  constants: dict | None = None,
) -> Family:
  constants = {"mixer": mixer, "channel_mixer": "swiglu", "norm": "rms"} | (constants or {})
  return Family(
    name=name,
    layout="fla",
    architecture=f"{architecture}ForCausalLM",
    fields=_GATED | fields,
    constants=constants | {"embedding_norm": False},
    rows=_ENDS | _MLP | linears("blocks.mixer", ATTN, **QKVO) | rows,
    normal=functools.partial(_normal, convolved=convolved),
    written=dict if convolved is None else _with_convolutions,
  )


def _hgrn2(config: Config) -> Config:
  ratio, dim, H = (
    config.pop("expand_ratio", 128),
    config.get("hidden_size"),
    config.get("num_heads"),
  )
  if type(dim) is not int or any(type(x) is not int or x < 1 for x in (ratio, H) if x is not None):
    raise ExportError(f"hidden_size, expand_ratio={ratio!r:.80}, num_heads={H!r:.80} are no sizes.")
  ratio = ratio or dim // (H or 1)
  config["num_heads"] = H or dim // ratio
  if dim != config["num_heads"] * ratio:
    raise ExportError(f"expand_ratio={ratio!r} is not hidden_size / num_heads.")
  return _normal(config)


def _hgrn2_written(config: Config) -> Config:
  return config | {"expand_ratio": config["hidden_size"] // config["num_heads"]}


TRANSFORMER = _family(
  "transformer",
  "Transformer",
  "softmax_attention",
  _EPS_OF_BLOCKS
  | _KV_HEADS
  | {
    "qkv_bias": choice("mixer_options.use_bias", {False: False, True: "qkv"}, False),
    "qk_norm": flag("mixer_options.qk_norm", False),
    "window_size": size_or_none("mixer_options.window"),
    "rope_theta": number("mixer_options.rotary_base", 10000.0),
    "max_position_embeddings": size("mixer_options.max_length", 2048),
    "elementwise_affine": Fixed(True),
  },
  norm("blocks.mixer.q_norm", f"{ATTN}.q_norm") | norm("blocks.mixer.k_norm", f"{ATTN}.k_norm"),
  constants={"mixer_options.norm_eps": 1e-5},  # of qk_norm, whatever norm_eps says
)

GLA = _family(
  "gla",
  "GLA",
  "gla",
  _KV_HEADS
  | _CONVOLVED
  | {
    "expand_k": number("mixer_options.expand_k", 0.5),
    "expand_v": number("mixer_options.expand_v", 1.0),
    "clamp_min": Field("mixer_options.clamp_min", (float, type(None)), None),
    "feature_map": choice(
      "mixer_options.feature_map", {None: "identity", "relu": "relu", **SILU}, None
    ),
    "elementwise_affine": flag("mixer_options.norm_scale", True),
    "use_output_gate": Fixed(True),
    "use_gk": Fixed(True),
    "use_gv": Fixed(False),
  },
  _CONVOLUTIONS
  | linears(
    "blocks.mixer",
    ATTN,
    g_proj="g_proj",
    decay_down_proj="gk_proj.0",
    decay_up_proj="gk_proj.1",
  )
  | norm("blocks.mixer.norm", f"{ATTN}.g_norm_swish_gate"),
  convolved=False,
  constants={"mixer_options.gate_rank": 16, "mixer_options.gate_logit_normalizer": 16},
)

RETNET = _family(
  "retnet",
  "RetNet",
  "retnet",
  _KV_HEADS
  | {
    "expand_k": ONE,
    "expand_v": number("mixer_options.expand_v", 2.0),
    "feature_map": Fixed(None),
    "elementwise_affine": flag("mixer_options.norm_scale", True),
    "use_output_gate": Fixed(True),
    "use_short_conv": Fixed(False),
    **free("conv_size"),
  },
  linear("blocks.mixer.g_proj", f"{ATTN}.g_proj")
  | norm("blocks.mixer.norm", f"{ATTN}.g_norm_swish_gate"),
)

_DELTA_ROWS = _CONVOLUTIONS | {
  **linears("blocks.mixer", ATTN, b_proj="b_proj", g_proj="g_proj"),
  **norm("blocks.mixer.norm", f"{ATTN}.o_norm"),
}

DELTA_NET = _family(
  "delta_net",
  "DeltaNet",
  "delta_net",
  _CONVOLVED
  | {
    "expand_k": number("mixer_options.expand_k", 1.0),
    "expand_v": number("mixer_options.expand_v", 1.0),
    "use_gate": flag("mixer_options.use_gate", False),
    "use_beta": flag("mixer_options.use_beta", True),
    "allow_neg_eigval": flag("mixer_options.allow_neg_eigval", False),
    "qk_norm": choice("mixer_options.qk_norm", {"l2": "l2", "sum": "sum"}, "l2"),
    "qk_activation": choice(
      "mixer_options.qk_activation",
      {name: name for name in ("silu", "relu", "elu", "identity")},
      "silu",
    ),
    "use_output_norm": Fixed(True),
  },
  _DELTA_ROWS,
  convolved=True,
)

GATED_DELTANET = _family(
  "gated_deltanet",
  "GatedDeltaNet",
  "gated_delta_net",
  _CONVOLVED
  | {
    "head_dim": size("mixer_options.head_dim", 256),
    "num_v_heads": size_or_none("mixer_options.num_value_heads"),
    "expand_v": number("mixer_options.expand_v", 2.0),
    "use_gate": flag("mixer_options.use_gate", True),
    "allow_neg_eigval": flag("mixer_options.allow_neg_eigval", False),
    "output_gate_activation": Fixed("swish", "silu"),
  },
  _DELTA_ROWS
  | {
    "blocks.mixer.a_proj.kernel": Row(f"{ATTN}.a_proj.weight", TRANSPOSED),
    "blocks.mixer.a_proj.bias": Row(f"{ATTN}.dt_bias"),
    "blocks.mixer.log_rate": Row(f"{ATTN}.A_log"),
  },
  convolved=True,
)

# Its output norm has an epsilon of 1e-5 whatever norm_eps says, as that of HGRN2.
GSA = _family(
  "gsa",
  "GSA",
  "gsa",
  _EPS_OF_BLOCKS
  | _KV_HEADS
  | _CONVOLVED
  | {
    "num_slots": size("mixer_options.num_slots", 64),
    "gate_logit_normalizer": number("mixer_options.gate_logit_normalizer", 8.0),
    "feature_map": choice("mixer_options.feature_map", {**SILU, "relu": "relu"}, "swish"),
    "expand_k": ONE,
    "expand_v": ONE,
    "clamp_min": Fixed(None),
    "clamp_max": Fixed(None),
    "elementwise_affine": Fixed(True),
    "use_output_gate": Fixed(False),
    "use_norm": Fixed(True),
  },
  _CONVOLUTIONS
  | linear("blocks.mixer.f_proj", f"{ATTN}.f_proj")
  | norm("blocks.mixer.norm", f"{ATTN}.g_norm"),
  convolved=False,
  constants={"mixer_options.norm_eps": 1e-5},
)

HGRN2 = Family(
  name="hgrn2",
  layout="fla",
  architecture="HGRN2ForCausalLM",
  fields=_GATED
  | _EPS_OF_BLOCKS
  | _PLAIN
  | {
    "use_lower_bound": choice("mixer_options.lower_bound", {True: "shared", False: "none"}, True),
  },
  constants={
    "mixer": "hgrn2",
    "mixer_options.variant": "fla",
    "mixer_options.norm_eps": 1e-5,
    "channel_mixer": "swiglu",
    "norm": "rms",
    "embedding_norm": False,
  },
  rows=_ENDS
  | _MLP
  | linears(
    "blocks.mixer", ATTN, q_proj="q_proj", f_proj="f_proj", v_proj="i_proj", o_proj="o_proj"
  )
  | norm("blocks.mixer.norm", f"{ATTN}.g_norm")
  | {"blocks.mixer.bound": Row("model.lower_bounds")},
  normal=_hgrn2,
  written=_hgrn2_written,
)


def _rwkv6(config: Config) -> Config:
  config = _normal(config, share=3.5, multiple=32)
  config["norm"] = "layer" if _boolean(config, "norm_bias", True) else "layer_without_bias"
  return config | {"g_norm_eps": config.get("norm_eps", 1e-5)}


def _rwkv6_written(config: Config) -> Config:
  config = config | {"norm_bias": config["norm"] == "layer"}
  return {name: value for name, value in config.items() if name not in ("norm", "g_norm_eps")}


RWKV6 = Family(
  name="rwkv6",
  layout="fla",
  architecture="RWKV6ForCausalLM",
  fields=_FIELDS
  | {
    "norm": Field("norm", (str,)),
    "norm_eps": number("norm_eps", 1e-5),
    "g_norm_eps": number("mixer_options.norm_eps", factor=1 / 64),  # ours divides by 8 first
    "expand_k": number("mixer_options.expand_k", 0.5),
    "expand_v": ONE,
    "proj_low_rank_dim": size("mixer_options.mix_rank", 32),
    "gate_low_rank_dim": size("mixer_options.gate_rank", 64),
    "hidden_act": Fixed("sqrelu"),
    "norm_first": Fixed(True),
  },
  constants={
    "mixer": "rwkv6",
    "channel_mixer": "rwkv6_channel_mix",
    "channel_mixer_options.mu_of": "previous",
    "embedding_norm": True,
  },
  rows=_ENDS
  | norm("embedding_norm", "model.layers.0.pre_norm")
  | norm("blocks.channel_norm", f"{LAYER}.ffn_norm")
  | rwkv6_rows(ATTN, f"{LAYER}.ffn"),
  normal=_rwkv6,
  written=_rwkv6_written,
)

FLA = (TRANSFORMER, GLA, RETNET, DELTA_NET, GATED_DELTANET, GSA, HGRN2, RWKV6)
