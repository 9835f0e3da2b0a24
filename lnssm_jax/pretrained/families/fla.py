"""The models of flash-linear-attention (fla 0.6.0), but for RWKV-6."""

import functools
import math

from lnssm_jax.ops.core.checks import is_number
from lnssm_jax.pretrained.families.fields import (
  Config,
  Field,
  Fixed,
  choice,
  flag,
  free,
  number,
  size,
  size_or_none,
  whole,
)
from lnssm_jax.pretrained.families.table import (
  GATED_MLP,
  QKVO,
  TRANSPOSED,
  Family,
  Row,
  Rows,
  convolution,
  joined,
  linear,
  linears,
  norm,
)
from lnssm_jax.pretrained.manifest import ExportError

LAYER = "model.layers.{}"
ATTN = f"{LAYER}.attn"
SILU = {"swish": "silu", "silu": "silu"}
ONE = Fixed(1.0, 1)

FIELDS = {
  "vocab_size": size("vocab_size"),
  "hidden_size": size("dim"),
  "num_hidden_layers": size("num_layers"),
  "num_heads": size("num_heads"),
  "intermediate_size": size("channel_hidden"),
  "norm_eps": number(("norm_eps", "mixer_options.norm_eps"), 1e-6),
  "tie_word_embeddings": flag("tie_embeddings", False),
  "attn": Fixed(None),
  "hidden_ratio": Fixed(None),
  **free(
    "another way to compute the same",
    "attn_mode",
    "chunk_size",
    "fuse_cross_entropy",
    "fuse_linear_cross_entropy",
    "fuse_norm",
  ),
  **free("of training", "use_l2warp"),
  **free("of training data", "max_position_embeddings"),
}
# In files of 2024. A convolution that q, k and v share has another tensor than theirs, and so does
# a norm within the mixer (`norm_first`); today's fla reads neither setting.
RENAMED = {
  "rms_norm_eps": "norm_eps",
  "num_attention_heads": "num_heads",
  "num_key_value_heads": "num_kv_heads",
}
_OLDER = free("of tensors, which are compared", "norm_first", "share_conv_kernel")
# Of models with a gated MLP, which are all but RWKV.
_GATED = FIELDS | {
  "hidden_act": choice("channel_mixer_options.activation", SILU, "swish"),
  "attnres_block_size": Fixed(None),
  **free("another way to compute the same", "fuse_swiglu"),
  **_OLDER,
}
_EPS_OF_BLOCKS = {"norm_eps": number("norm_eps", 1e-6)}
_KV_HEADS = {"num_kv_heads": size("mixer_options.num_kv_heads")}
_CONVOLVED = {"conv_size": size_or_none("mixer_options.conv_size")}
# Without, the norm within a mixer that has an output gate has another name.
_FUSED_NORM = {"fuse_norm": Fixed(True)}
_NO_CONVOLUTION = {
  "use_short_conv": Fixed(False),
  **free("of convolutions, of which there are none", "conv_size"),
}

ENDS: Rows = {
  "embedding": Row("model.embeddings.weight"),
  "head.kernel": Row("lm_head.weight", TRANSPOSED),
  **norm("norm", "model.norm"),
  **norm("blocks.mixer_norm", f"{LAYER}.attn_norm"),
}
_MLP: Rows = {
  **norm("blocks.channel_norm", f"{LAYER}.mlp_norm"),
  **linears("blocks.channel_mixer", f"{LAYER}.mlp", **GATED_MLP),
}
_CONVOLUTIONS = joined(convolution(f"blocks.mixer.{x}_conv", f"{ATTN}.{x}_conv1d") for x in "qkv")


def normal(
  config: Config,
  *,
  ratio: float = 4,
  gated: bool = True,
  grouped: bool = False,
  convolved: bool | None = None,
) -> Config:
  """Writes out widths and groups, and conv_size=None where there are no convolutions.

  Args:
    ratio: hidden_ratio where config.json has none. A gated MLP is 2/3 hidden_ratio D wide, rounded
      up to a multiple of 256; another one hidden_ratio D, rounded up to a multiple of 32.
    gated: whether the MLP is.
    grouped: whether there is num_kv_heads, by default num_heads.
    convolved: the default of use_short_conv, where it can be chosen.
  """
  dim, given = whole(config, "hidden_size"), config.pop("hidden_ratio", ratio)
  if config.get("intermediate_size") is None:
    given = 4 if given is None and gated else 3.5 if given is None else given
    if not is_number(given) or not 0 < given < 1000:
      raise ExportError(f"hidden_ratio={given!r:.80} must be a number above 0 and below 1000.")
    width, multiple = (dim * given * 2 / 3, 256) if gated else (dim * given, 32)
    config["intermediate_size"] = multiple * math.ceil(int(width) / multiple)
  if grouped and config.get("num_kv_heads") is None and "num_heads" in config:
    config["num_kv_heads"] = config["num_heads"]
  if convolved is not None:
    config.setdefault("conv_size", 4)
    if not boolean(config, "use_short_conv", convolved):
      config["conv_size"] = None
  return config


def boolean(config: Config, name: str, default: bool) -> bool:
  """Removes a setting that is true or false."""
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
  ratio: float = 4,
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
    rows=ENDS | _MLP | linears("blocks.mixer", ATTN, **QKVO) | rows,
    normal=functools.partial(
      normal, ratio=ratio, grouped="num_kv_heads" in fields, convolved=convolved
    ),
    written=dict if convolved is None else _with_convolutions,
    renamed=RENAMED | {"exapnd_k": "expand_k", "exapnd_v": "expand_v"},  # GSA's class has these
  )


def _hgrn2(config: Config) -> Config:
  """Writes out the heads: expand_ratio is their width, which fla has as 128 by default."""
  dim, given = whole(config, "hidden_size"), {"expand_ratio": config.pop("expand_ratio", 128)}
  H = None if config.get("num_heads") is None else whole(config, "num_heads")
  ratio = dim // (H or 1) if given["expand_ratio"] is None else whole(given, "expand_ratio")
  config["num_heads"] = H or max(1, dim // ratio)
  if dim != config["num_heads"] * ratio:
    raise ExportError(
      f"expand_ratio={ratio!r} is not hidden_size / num_heads = {dim} / {config['num_heads']}."
    )
  return normal(config)


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
    # In files of 2024, which read them no more than today's fla does.
    "attention_bias": Fixed(False, written=False),
    "rope_scaling": Fixed(None, written=False),
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
  | _FUSED_NORM
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
  | _FUSED_NORM
  | {
    "expand_k": ONE,
    "expand_v": number("mixer_options.expand_v", 2.0),
    "feature_map": Fixed(None),
    "elementwise_affine": flag("mixer_options.norm_scale", True),
    "use_output_gate": Fixed(True),
    **_NO_CONVOLUTION,
    **free("of GLA, not of RetNet", "use_gk", "use_gv"),
  },
  linear("blocks.mixer.g_proj", f"{ATTN}.g_proj")
  | norm("blocks.mixer.norm", f"{ATTN}.g_norm_swish_gate"),
  ratio=2,
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
    "use_elu": Fixed(False, written=False),
    "use_rope": Fixed(False, written=False),
    "elementwise_affine": Fixed(True, written=False),
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
    "elementwise_affine": flag("mixer_options.norm_scale", True),
    "use_norm": Fixed(True),
    "use_rope": Fixed(False, written=False),
    "gate_low_rank_dim": Fixed(None, written=False),
    **free("fla does not read it; there is no output gate", "use_output_gate"),
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
  | _NO_CONVOLUTION
  | {
    "elementwise_affine": Fixed(True),
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
  rows=ENDS
  | _MLP
  | linears(
    "blocks.mixer", ATTN, q_proj="q_proj", f_proj="f_proj", v_proj="i_proj", o_proj="o_proj"
  )
  | norm("blocks.mixer.norm", f"{ATTN}.g_norm")
  | {"blocks.mixer.bound": Row("model.lower_bounds")},
  normal=_hgrn2,
  written=_hgrn2_written,
  renamed=RENAMED,
)

FLA = (TRANSFORMER, GLA, RETNET, DELTA_NET, GATED_DELTANET, GSA, HGRN2)
