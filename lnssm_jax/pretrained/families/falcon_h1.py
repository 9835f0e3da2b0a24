"""Falcon-H1 (TII 2025), of transformers: Mamba-2 and attention side by side, with multipliers."""

import math
from typing import Any

from lnssm_jax.ops.core.checks import is_number
from lnssm_jax.pretrained.families.fields import (
  Config,
  Field,
  Fixed,
  choice,
  flag,
  free,
  number,
  number_or_none,
  size,
  whole,
)
from lnssm_jax.pretrained.families.hybrids import BAMBA, CONSTANTS
from lnssm_jax.pretrained.families.llama import SILU, SIZES, heads, rotary, rotary_written
from lnssm_jax.pretrained.families.mamba import steps, steps_written
from lnssm_jax.pretrained.families.table import Family
from lnssm_jax.pretrained.manifest import ExportError

_ALL = "mixer_options.mixers"
_ATTENTION, _MAMBA = f"{_ALL}.softmax_attention", f"{_ALL}.mamba2"
_ORDERS = {(True, True): "norm_first", (True, False): "gate_first", (False, True): "none"}


def _normal(config: Config) -> Config:
  config.setdefault("num_key_value_heads", 8)
  config = rotary(heads(config), usual_length=8192)
  D, H = config["hidden_size"], whole(config, "mamba_n_heads", 128)
  inner = config.pop("mamba_d_ssm", 1024)
  if inner is None:
    inner = D * whole(config, "mamba_expand", 2)
  inner = whole({"mamba_d_ssm": inner}, "mamba_d_ssm")
  width = config.get("mamba_d_head", "auto")
  if width not in ("auto", inner / H) or inner % H:
    raise ExportError(
      f"mamba_n_heads={H} times mamba_d_head={width!r:.80} is not mamba_d_ssm={inner}."
    )
  config.pop("mamba_n_heads", None)
  usual = {"mamba_rms_norm": False, "mamba_norm_before_gate": True}
  normed = [config.pop(name, value) for name, value in usual.items()]
  if any(type(x) is not bool for x in normed):
    raise ExportError(
      f"mamba_rms_norm={normed[0]!r:.80} and mamba_norm_before_gate={normed[1]!r:.80} must be bool."
    )
  biases = [config.get("mamba_proj_bias", False), config.pop("projectors_bias", False)]
  if biases[0] is not biases[1]:
    raise ExportError(
      f"mamba_proj_bias={biases[0]!r:.80}, projectors_bias={biases[1]!r:.80}: a bias of one of the"
      " two projections alone is not implemented."
    )
  config["gate_scale"], config["output_scale"] = _numbers(config, "mlp_multipliers", 2)
  config["ssm_multipliers"] = _numbers(config, "ssm_multipliers", 5)
  key = config.pop("key_multiplier", 1.0)
  if not is_number(key):
    raise ExportError(f"key_multiplier={key!r:.80} must be a number.")
  return steps(config) | {
    "mamba_d_head": inner // H,
    "expand": inner / D,
    "norm_order": _ORDERS.get((normed[0], normed[1]), "none"),
    "scale": key / math.sqrt(whole(config, "head_dim")),
  }


def _numbers(config: Config, name: str, count: int) -> list[float]:
  given = config.pop(name, None)
  given = [1.0] * count if given is None else given
  if not isinstance(given, list) or len(given) != count or not all(map(is_number, given)):
    raise ExportError(f"{name}={given!r:.80} must be a list of {count} numbers.")
  return [float(x) for x in given]


def _written(config: Config) -> Config:
  config = rotary_written(steps_written(config))
  inner = round(config.pop("expand") * config["hidden_size"])
  orders = {order: given for given, order in _ORDERS.items()}
  normed, before = orders[config.pop("norm_order")]
  return config | {
    "key_multiplier": _key_multiplier(config.pop("scale"), config["head_dim"]),
    "mlp_multipliers": [config.pop("gate_scale"), config.pop("output_scale")],
    "projectors_bias": config["mamba_proj_bias"],
    "mamba_d_ssm": inner,
    "mamba_n_heads": inner // config["mamba_d_head"],
    "mamba_rms_norm": normed,
    "mamba_norm_before_gate": before,
  }


def _key_multiplier(scale: float, width: int) -> float:
  """The number of fewest digits that gives this scale of the scores."""
  near = scale * math.sqrt(width)
  found = [float(f"{near:.{n}g}") for n in range(1, 18)]
  found += [math.nextafter(near, 0), math.nextafter(near, math.inf)]
  return next((x for x in found if x / math.sqrt(width) == scale), near)


def _parts(rows: Any) -> Any:
  """Rows of Bamba, whose mixers are parts here."""
  for mixer in ("mamba2", "softmax_attention"):
    own = f"blocks.{mixer}."
    rows = {x.replace(own, f"blocks.mixer.parts.{mixer}.mixer."): row for x, row in rows.items()}
  return rows


FALCON_H1 = Family(
  name="falcon_h1",
  layout="hf",
  architecture="FalconH1ForCausalLM",
  fields=SIZES
  | {
    "intermediate_size": size("channel_hidden", 14336),
    "rms_norm_eps": number(("norm_eps", f"{_MAMBA}.norm_eps"), 1e-5),
    "tie_word_embeddings": flag("tie_embeddings", False),
    "hidden_act": choice("channel_mixer_options.activation", SILU, "silu"),
    "mlp_bias": flag("channel_mixer_options.use_bias", False),
    "gate_scale": number("channel_mixer_options.gate_scale"),
    "output_scale": number("channel_mixer_options.output_scale"),
    "embedding_multiplier": number("embedding_scale", 1.0),
    "lm_head_multiplier": number("logit_scale", 1.0),
    "num_attention_heads": size((f"{_ATTENTION}.num_heads", "num_heads")),
    "num_key_value_heads": size(f"{_ATTENTION}.num_kv_heads"),
    "head_dim": size((f"{_ATTENTION}.head_dim", f"{_ATTENTION}.value_head_dim")),
    "max_position_embeddings": size(f"{_ATTENTION}.max_length", 8192),
    "attention_bias": flag(f"{_ATTENTION}.use_bias", False),
    "attention_dropout": number(f"{_ATTENTION}.attention_dropout", 0.0),
    "rope_theta": number(f"{_ATTENTION}.rotary_base"),
    "rope_scaling": Field(f"{_ATTENTION}.rotary_scaling", (dict, type(None))),
    "scale": number(f"{_ATTENTION}.scale"),
    "attention_in_multiplier": number("mixer_options.input_scales.softmax_attention", 1.0),
    "attention_out_multiplier": number("mixer_options.output_scales.softmax_attention", 1.0),
    "ssm_in_multiplier": number("mixer_options.input_scales.mamba2", 1.0),
    "ssm_out_multiplier": number("mixer_options.output_scales.mamba2", 1.0),
    "ssm_multipliers": Field(f"{_MAMBA}.part_scales", (list,)),
    "expand": number(f"{_MAMBA}.expand"),
    "norm_order": Field(f"{_MAMBA}.norm_order", (str,)),
    "mamba_d_head": size(f"{_MAMBA}.head_dim"),
    "mamba_n_groups": size(f"{_MAMBA}.num_groups", 1),
    "mamba_d_state": size(f"{_MAMBA}.state_dim", 256),
    "mamba_d_conv": size(f"{_MAMBA}.conv_size", 4),
    "mamba_conv_bias": flag(f"{_MAMBA}.conv_bias", True),
    "mamba_proj_bias": flag(f"{_MAMBA}.use_bias", False),
    "min_step": number(f"{_MAMBA}.min_step"),
    "max_step": number_or_none(f"{_MAMBA}.max_step"),
    "mamba_use_mlp": Fixed(True, written=False),  # the published files have it
    **free("of the width of Mamba-2, which mamba_d_ssm says", "mamba_expand"),
    **free("of the width of the MLP, which intermediate_size says", "mlp_expansion_factor"),
    **free("another way to compute the same", "mamba_chunk_size"),
    **free("of random parameters", "time_step_floor", "time_step_max", "time_step_min"),
  },
  constants={"mixer": "parallel", "norm": "rms", **CONSTANTS},
  rows=_parts(BAMBA.rows),
  normal=_normal,
  written=_written,
)
