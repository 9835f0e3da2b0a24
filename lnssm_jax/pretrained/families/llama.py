"""Llama, of transformers."""

import math
from typing import Any

from lnssm_jax.ops.attention.rotary import check_scaling
from lnssm_jax.ops.core.checks import is_number
from lnssm_jax.pretrained.families.fields import (
  Config,
  Field,
  Fixed,
  agree,
  choice,
  flag,
  free,
  number,
  size,
  whole,
)
from lnssm_jax.pretrained.families.table import (
  GATED_MLP,
  QKVO,
  TRANSPOSED,
  Family,
  Row,
  linears,
  norm,
)
from lnssm_jax.pretrained.manifest import ExportError

SILU = {"silu": "silu", "swish": "silu"}  # two names of one function; the first is written
# {rule: {their number: ours}}
_SCALINGS = {
  "linear": {"factor": "factor"},
  "llama3": {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_length",
  },
  "yarn": {
    "factor": "factor",
    "beta_slow": "slow_turns",
    "beta_fast": "fast_turns",
    "original_max_position_embeddings": "original_length",
    "attention_factor": "magnitude",
    "truncate": "whole_pairs",
  },
  "dynamic": {"factor": "factor", "max_position_embeddings": "original_length"},
}


def rotary(config: Config, *, usual_length: int = 2048, default: float = 10000.0) -> Config:
  """Replaces `rope_parameters`, of transformers 5, by the settings of version 4.

  `rope_scaling` is then that of `lnssm_jax.ops.rotary_embedding`, or None.

  Args:
    usual_length: max_position_embeddings where config.json has none.
    default: that of rope_theta.
  """
  given = {name: config.pop(name, None) for name in ("rope_parameters", "rope_scaling")}
  given = {name: _rope(name, value) for name, value in given.items() if value is not None}
  original = config.pop("original_max_position_embeddings", None)
  for name in ("rope_theta", "partial_rotary_factor"):
    for setting, rope in given.items():
      if (value := rope.pop(name, None)) is not None:
        agree(dict(config), name, value, f"{setting}.{name}")
        config[name] = value
  if config.get("rope_theta") is None:
    config["rope_theta"] = default
  config["rope_scaling"] = None
  if len(given) > 1 and given["rope_parameters"] != given["rope_scaling"]:
    raise ExportError("rope_parameters and rope_scaling are two descriptions; remove one.")
  for setting, rope in list(given.items())[:1]:
    rule = rope.pop("rope_type")
    numbers = {} if rule == "default" else _SCALINGS.get(str(rule))
    if numbers is None:
      known = ", ".join(map(repr, ("default", *_SCALINGS)))
      raise ExportError(f"{setting}.rope_type={rule!r:.80} is not implemented; only {known}.")
    if rule in ("llama3", "yarn", "dynamic"):
      longest = whole(config, "max_position_embeddings", usual_length)
      if original is not None:  # before that of the rule, as there
        rope["original_max_position_embeddings"] = original
      if rule == "dynamic":  # which transformers applies from max_position_embeddings on
        rope.pop("original_max_position_embeddings", None)
        rope["max_position_embeddings"] = longest
      else:
        rope = {"original_max_position_embeddings": longest} | rope
      rope = _yarn(rope, longest) if rule == "yarn" else rope
    if rule == "yarn" and (given_factor := rope.get("attn_factor")) is not None:
      raise ExportError(  # as in DeepSeek-R1-0528-Qwen3-8B
        f"{setting}.attn_factor={given_factor!r:.80}: other programs multiply the magnitude by it, "
        "transformers does not read it. Remove it to compute what transformers does, or write "
        f"attention_factor={given_factor * rope['attention_factor']:.6g} in its place."
      )
    scaling: Config = {"rule": rule}
    for name, value in rope.items():
      if name not in numbers:
        raise ExportError(f"{setting}.{name}={value!r:.80} is not a known setting.")
      scaling[numbers[name]] = value
    if numbers:
      try:
        config["rope_scaling"] = check_scaling(scaling)
      except ValueError as error:
        raise ExportError(f"{setting}: {error}") from None
  return config


def _rope(setting: str, rope: Any) -> Config:
  """A copy of a rule, which has its kind in `rope_type`, in older files in `type`."""
  if not isinstance(rope, dict):
    raise ExportError(f"{setting}={rope!r:.80} is not an object.")
  # Yarn's authors say in `finetuned` how the weights were made.
  rope = {name: value for name, value in rope.items() if value is not None and name != "finetuned"}
  rule = rope.setdefault("rope_type", rope.get("type", "default"))
  agree(rope, "type", rule, f"{setting}.rope_type")
  return rope


def _yarn(rope: Config, longest: int) -> Config:
  """`rope` with the numbers that transformers computes from others where they are not given."""
  for name, value in rope.items():
    if name != "truncate" and (not is_number(value) or not 0 <= value < math.inf):
      raise ExportError(f"{name}={value!r:.80} of the rule 'yarn' must be a number.")
  original = rope["original_max_position_embeddings"] or 1
  factor = rope.setdefault("factor", longest / original)
  magnitude = lambda scale: 1 + 0.1 * scale * math.log(max(factor, 1))
  scale, all_dim = rope.pop("mscale", 0), rope.pop("mscale_all_dim", 0)
  usual = magnitude(scale) / magnitude(all_dim) if scale and all_dim else magnitude(1)
  rope = {"attention_factor": usual, "truncate": True} | rope
  return rope | {"beta_fast": rope.get("beta_fast") or 32, "beta_slow": rope.get("beta_slow") or 1}


def rotary_written(config: Config) -> Config:
  """The inverse of `rotary`, as transformers 4 writes it."""
  scaling = config.get("rope_scaling")
  if scaling is None:
    return config
  names = _SCALINGS[scaling["rule"]]
  theirs = {name: scaling[ours] for name, ours in names.items() if name not in config}
  return config | {"rope_scaling": {"rope_type": scaling["rule"], **theirs}}


def heads(config: Config) -> Config:
  """Gives `head_dim` and `num_key_value_heads` their defaults."""
  D, H = whole(config, "hidden_size"), whole(config, "num_attention_heads")
  if config.get("head_dim") is None:
    if D % H:
      raise ExportError(f"hidden_size={D} is not a multiple of num_attention_heads={H}.")
    config["head_dim"] = D // H
  if config.get("num_key_value_heads") is None:
    config["num_key_value_heads"] = H
  return config


def whole_heads(config: Config) -> Config:
  """As `heads`, where `head_dim` must be D / H."""
  config = heads(config)
  D, H, K = config["hidden_size"], config["num_attention_heads"], config.pop("head_dim")
  if K != D / H:
    raise ExportError(
      f"head_dim={K!r:.80} is not implemented; only hidden_size / num_attention_heads = {D / H:g}."
    )
  return config


TOP = {
  "embedding": Row("model.embed_tokens.weight"),
  "head.kernel": Row("lm_head.weight", TRANSPOSED),
  **norm("norm", "model.norm"),
}
SIZES = {
  "vocab_size": size("vocab_size"),
  "hidden_size": size("dim"),
  "num_hidden_layers": size("num_layers"),
}
LAYER = "model.layers.{}"

LLAMA = Family(
  name="llama",
  layout="hf",
  architecture="LlamaForCausalLM",
  constants={
    "mixer": "softmax_attention",
    "channel_mixer": "swiglu",
    "norm": "rms",
    "embedding_norm": False,
  },
  fields=SIZES
  | {
    "intermediate_size": size("channel_hidden"),
    "num_attention_heads": size("num_heads"),
    "num_key_value_heads": size("mixer_options.num_kv_heads"),
    "max_position_embeddings": size("mixer_options.max_length", 2048),
    "rms_norm_eps": number("norm_eps", 1e-6),
    "rope_theta": number("mixer_options.rotary_base"),
    "attention_bias": flag("mixer_options.use_bias", False),
    "mlp_bias": flag("channel_mixer_options.use_bias", False),
    "attention_dropout": number("mixer_options.attention_dropout", 0.0),
    "tie_word_embeddings": flag("tie_embeddings", False),
    "hidden_act": choice("channel_mixer_options.activation", SILU, "silu"),
    "head_dim": size(("mixer_options.head_dim", "mixer_options.value_head_dim")),
    "rope_scaling": Field("mixer_options.rotary_scaling", (dict, type(None))),
    "partial_rotary_factor": Fixed(1.0, 1, written=False),
    "rope_interleaved": Fixed(False, written=False),
    "activation": Fixed("swiglu", written=False),  # Falcon 3 has it besides hidden_act
  }
  | free("says where the file comes from", "is_llama_config")
  | free("another way to compute the same", "pretraining_tp")
  | free("of training data", "max_sequence_length"),
  normal=lambda config: rotary(heads(config)),
  written=rotary_written,
  rows=TOP
  | linears("blocks.mixer", f"{LAYER}.self_attn", **QKVO)
  | linears("blocks.channel_mixer", f"{LAYER}.mlp", **GATED_MLP)
  | norm("blocks.mixer_norm", f"{LAYER}.input_layernorm")
  | norm("blocks.channel_norm", f"{LAYER}.post_attention_layernorm"),
  skipped=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)
