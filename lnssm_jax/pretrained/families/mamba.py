"""Mamba, Mamba-2 and FalconMamba of transformers, and Mamba and Mamba-2 of mamba-ssm."""

import math
from typing import Any

from lnssm_jax.ops.core.checks import is_number
from lnssm_jax.pretrained.families.fields import (
  Config,
  Field,
  Fixed,
  Free,
  Same,
  agree,
  flag,
  free,
  number,
  number_or_none,
  same,
  size,
  whole,
  without,
)
from lnssm_jax.pretrained.families.table import (
  TRANSPOSED,
  Family,
  Row,
  Rows,
  convolution,
  linears,
  norm,
)
from lnssm_jax.pretrained.manifest import ExportError

LAYER = "backbone.layers.{}"
MIXER = f"{LAYER}.mixer"
_PROJECTIONS = {"in_proj": "in_proj", "o_proj": "out_proj"}

_CONSTANTS = {"channel_mixer": "none", "norm": "rms", "embedding_norm": False, "num_heads": None}
_FIELDS = {
  "vocab_size": size("vocab_size"),
  "hidden_size": size("dim"),
  "num_hidden_layers": size("num_layers"),
  "state_size": size("mixer_options.state_dim"),
  "conv_kernel": size("mixer_options.conv_size", 4),
  "expand": size("mixer_options.expand"),
  "use_bias": flag("mixer_options.use_bias", False),
  "use_conv_bias": flag("mixer_options.conv_bias", True),
  "layer_norm_epsilon": number("norm_eps", 1e-5),
  "tie_word_embeddings": flag("tie_embeddings", True),
  "hidden_act": Fixed("silu", "swish"),
  "rms_norm": Fixed(True, written=False),
  **free("the stream here is of `dtype`, equal in float32", "residual_in_fp32"),
  **free(
    "of random parameters",
    "rescale_prenorm_residual",
    "time_step_floor",
    "time_step_init_scheme",
    "time_step_max",
    "time_step_min",
    "time_step_scale",
  ),
  **free(
    "another way to compute the same",
    "fused_add_norm",
    "use_associative_scan",
    "use_falcon_mambapy",
    "use_mambapy",
  ),
  # Conversions from mamba-ssm keep its names too.
  "d_model": same("hidden_size"),
  "n_layer": same("num_hidden_layers"),
  "d_inner": Same(
    "intermediate_size, or expand hidden_size,", lambda c: c["expand"] * c["hidden_size"]
  ),
  **free("vocab_size has the padding; it must be that of the embedding", "pad_vocab_size_multiple"),
  "ssm_cfg": Same("what the other settings say", lambda config: _options(config)),
}


def mamba2(ours: str, theirs: str) -> Rows:
  """Mamba-2 as a mixer."""
  return {
    **linears(ours, theirs, **_PROJECTIONS),
    **convolution(f"{ours}.conv", f"{theirs}.conv1d"),
    **norm(f"{ours}.norm", f"{theirs}.norm"),
    f"{ours}.skip": Row(f"{theirs}.D"),
    f"{ours}.dt_bias": Row(f"{theirs}.dt_bias"),
    f"{ours}.log_rate": Row(f"{theirs}.A_log"),
  }


_ROWS: Rows = {
  "embedding": Row("backbone.embeddings.weight"),
  "head.kernel": Row("lm_head.weight", TRANSPOSED),
  **norm("norm", "backbone.norm_f"),
  **norm("blocks.mixer_norm", f"{LAYER}.norm"),
  **linears("blocks.mixer", MIXER, **_PROJECTIONS),
  **convolution("blocks.mixer.conv", f"{MIXER}.conv1d"),
  "blocks.mixer.skip": Row(f"{MIXER}.D"),
}
_ROWS_1 = _ROWS | {
  **linears("blocks.mixer", MIXER, x_proj="x_proj", dt_proj="dt_proj"),
  "blocks.mixer.a_log": Row(f"{MIXER}.A_log"),
}
_ROWS_2 = _ROWS | mamba2("blocks.mixer", MIXER)


# {option of a layer of mamba-ssm: the setting of transformers}
_SSM_NAMES = {
  "d_state": "state_size",
  "d_conv": "conv_kernel",
  "expand": "expand",
  "dt_rank": "time_step_rank",
  "bias": "use_bias",
  "conv_bias": "use_conv_bias",
  "headdim": "head_dim",
  "ngroups": "n_groups",
}


def _options(config: Config) -> dict[str, Any]:
  """`ssm_cfg` with the values that the other settings have, and those that are free."""
  given = config["ssm_cfg"] if isinstance(config["ssm_cfg"], dict) else {}
  known = [n for n in given if n in _SSM_NAMES or isinstance(_SSM_FIELDS.get(n), Free)]
  layer = {"layer": "Mamba2" if config.get("model_type") == "mamba2" else "Mamba1"}
  said = {name: config.get(_SSM_NAMES.get(name, ""), given[name]) for name in known}
  return said | (layer if "layer" in given else {})


def _rank(config: Config) -> Config:
  """Writes out time_step_rank, and expand by a width E, which is what transformers reads."""
  dim = whole(config, "hidden_size")
  expand, inner = whole(config, "expand", 2), config.pop("intermediate_size", None)
  if inner is not None:
    inner = whole({"intermediate_size": inner}, "intermediate_size")
    if inner % dim:
      raise ExportError(f"intermediate_size={inner} must be a multiple of hidden_size={dim}.")
    expand = inner // dim
  if config.get("time_step_rank", "auto") == "auto":
    config["time_step_rank"] = math.ceil(dim / 16)
  return config | {"expand": expand}


# `steps` of a model whose mixer is alone.
STEPS = {
  "min_step": number("mixer_options.min_step"),
  "max_step": number_or_none("mixer_options.max_step"),
}


def steps(config: Config, name: str = "time_step_limit") -> Config:
  """Writes out the range of step sizes as two settings."""
  limit = config.pop(name, None)
  limit = [0.0, math.inf] if limit is None else limit
  if (
    not isinstance(limit, list)
    or len(limit) != 2
    or not all(is_number(x) and not math.isnan(x) for x in limit)
  ):
    raise ExportError(f"{name}={limit!r:.80} must be two numbers, of the least and largest step.")
  if not 0 <= limit[0] <= limit[1]:
    raise ExportError(f"{name}={limit!r:.80} is no range of step sizes.")
  # Files of Nemotron 3 Ultra have 1e308 for infinity; steps are float32.
  return config | {"min_step": limit[0], "max_step": None if limit[1] > 1e38 else limit[1]}


def steps_written(config: Config, name: str = "time_step_limit") -> Config:
  """The inverse of `steps`."""
  low, high = config.pop("min_step"), config.pop("max_step")
  return config | {name: [low, math.inf if high is None else high]}


def _mamba2(config: Config) -> Config:
  """As transformers, which reads expand whatever intermediate_size says."""
  expand = whole(config, "expand", 2)
  inner = whole(config, "hidden_size") * expand
  H, P = whole(config, "num_heads", 128), whole(config, "head_dim", 64)
  if inner != H * P:
    raise ExportError(f"num_heads={H} times head_dim={P} is not expand hidden_size = {inner}.")
  config = steps(config | {"expand": expand, "head_dim": P})
  return without(config, "num_heads")


def _mamba2_written(config: Config) -> Config:
  inner = config["expand"] * config["hidden_size"]
  return steps_written(config) | {"num_heads": inner // config["head_dim"]}


_OLDER = {"backbone.embedding.": "backbone.embeddings."}
_GATE_RANK = {"time_step_rank": size("mixer_options.gate_rank")}

MAMBA = Family(
  name="mamba",
  layout="hf",
  architecture="MambaForCausalLM",
  fields=_FIELDS | _GATE_RANK,
  constants={"mixer": "mamba", **_CONSTANTS},
  rows=_ROWS_1,
  normal=_rank,
  older_tensors=_OLDER,
)

FALCON_MAMBA = Family(
  name="falcon_mamba",
  layout="hf",
  architecture="FalconMambaForCausalLM",
  fields=_FIELDS | _GATE_RANK | {"mixer_rms_eps": number("mixer_options.norm_eps", 1e-6)},
  constants={"mixer": "mamba", "mixer_options.inner_norm": "rms", **_CONSTANTS},
  rows=_ROWS_1,
  normal=_rank,
)

MAMBA2 = Family(
  name="mamba2",
  layout="hf",
  architecture="Mamba2ForCausalLM",
  fields=_FIELDS
  | {
    "layer_norm_epsilon": number(("norm_eps", "mixer_options.norm_eps"), 1e-5),
    "head_dim": size("mixer_options.head_dim"),
    "n_groups": size("mixer_options.num_groups", 8),
    "tie_word_embeddings": flag("tie_embeddings", False),
    **STEPS,
    "intermediate_size": Same("expand hidden_size", lambda c: c["expand"] * c["hidden_size"]),
    **free("another way to compute the same", "chunk_size"),
    **free("of Mamba-1; Mamba-2 has one step size per head", "time_step_rank"),
    # Saved by transformers 4.44 and the file of Codestral; transformers always multiplies first.
    **free("transformers does not read it; the gate comes before the norm", "norm_before_gate"),
  },
  constants={"mixer": "mamba2", **_CONSTANTS},
  rows=_ROWS_2,
  normal=_mamba2,
  written=_mamba2_written,
  older_tensors=_OLDER,
)


# mamba-ssm: the options of a layer are in one object, and a vocabulary is padded when it is used.
_SSM_FIELDS = {
  "vocab_size": size("vocab_size"),
  "d_model": size("dim"),
  "n_layer": size("num_layers"),
  "d_state": size("mixer_options.state_dim"),
  "d_conv": size("mixer_options.conv_size", 4),
  "expand": size("mixer_options.expand", 2),
  "bias": flag("mixer_options.use_bias", False),
  "conv_bias": flag("mixer_options.conv_bias", True),
  "tie_embeddings": flag("tie_embeddings", True),
  "rms_norm": Fixed(True),
  "attn_layer_idx": Fixed([], None),
  "attn_cfg": Fixed({}, None),
  "d_intermediate": Fixed(0),
  **free("the stream here is of `dtype`, equal in float32", "residual_in_fp32"),
  **free(
    "another way to compute the same",
    "chunk_size",
    "fused_add_norm",
    "process_group",
    "sequence_parallel",
    "use_fast_path",
    "use_mem_eff_path",
  ),
  **free(
    "of random parameters",
    "A_init_range",
    "conv_init",
    "dt_init",
    "dt_init_floor",
    "dt_max",
    "dt_min",
    "dt_scale",
  ),
}
_IN_LAYER = ("d_state", "d_conv", "expand", "bias", "conv_bias", "dt_rank")
_IN_LAYER_2 = ("headdim", "ngroups", "norm_before_gate", "rmsnorm", "dt_limit", "D_has_hdim")


def _ssm(layer: str):
  def normal(config: Config) -> Config:
    options = config.pop("ssm_cfg", None) or {}
    if not isinstance(options, dict):
      raise ExportError(f"ssm_cfg={options!r:.80} is not an object.")
    options = dict(options)
    agree(options, "layer", layer, "the layer of this family")
    if both := options.keys() & config.keys():
      raise ExportError(f"ssm_cfg.{sorted(both)[0]} is also a setting of the model.")
    config |= options
    dim, multiple = whole(config, "d_model"), whole(config, "pad_vocab_size_multiple", 8)
    config["vocab_size"] = multiple * -(-whole(config, "vocab_size") // multiple)
    config.pop("pad_vocab_size_multiple", None)
    config.setdefault("d_state", 16 if layer == "Mamba1" else 128)
    if layer == "Mamba1" and config.get("dt_rank", "auto") == "auto":
      config["dt_rank"] = -(-dim // 16)
    if layer == "Mamba2":
      agree(config, "d_ssm", whole(config, "expand", 2) * dim, "expand d_model")
    return config if layer == "Mamba1" else steps(config, "dt_limit")

  return normal


def _ssm_written(layer: str):
  def written(config: Config) -> Config:
    kept = without(config, "architectures", "model_type")
    kept = kept if layer == "Mamba1" else steps_written(kept, "dt_limit")
    options = {n: kept.pop(n) for n in (*_IN_LAYER, *_IN_LAYER_2) if n in kept}
    options.pop("D_has_hdim", None)
    return kept | {"ssm_cfg": {"layer": layer, **options}, "pad_vocab_size_multiple": 1}

  return written


_SSM_EMBEDDING = {"embedding": Row("backbone.embedding.weight")}

MAMBA_SSM = Family(
  name="mamba_ssm",
  layout="mamba_ssm",
  architecture="MambaLMHeadModel",
  fields=_SSM_FIELDS | {"dt_rank": size("mixer_options.gate_rank")},
  constants={"mixer": "mamba", "norm_eps": 1e-5, **_CONSTANTS},
  rows=_ROWS_1 | _SSM_EMBEDDING,
  normal=_ssm("Mamba1"),
  written=_ssm_written("Mamba1"),
)

MAMBA2_SSM = Family(
  name="mamba2_ssm",
  layout="mamba_ssm",
  architecture="MambaLMHeadModel",
  fields=_SSM_FIELDS
  | {
    "headdim": size("mixer_options.head_dim", 64),
    "ngroups": size("mixer_options.num_groups", 1),
    "norm_before_gate": Field(
      "mixer_options.norm_order", (), False, {False: "gate_first", True: "norm_first"}
    ),
    "rmsnorm": Fixed(True),
    "D_has_hdim": Fixed(False),
    **STEPS,
  },
  constants={"mixer": "mamba2", "norm_eps": 1e-5, "mixer_options.norm_eps": 1e-5, **_CONSTANTS},
  rows=_ROWS_2 | _SSM_EMBEDDING,
  normal=_ssm("Mamba2"),
  written=_ssm_written("Mamba2"),
)
