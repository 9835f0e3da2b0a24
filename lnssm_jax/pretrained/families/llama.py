"""Llama, of transformers."""

from lnssm_jax.pretrained.families.table import (
  TRANSPOSED,
  Config,
  Family,
  Fixed,
  Row,
  choice,
  flag,
  free,
  linears,
  norm,
  number,
  size,
)
from lnssm_jax.pretrained.manifest import ExportError


def rotary(config: Config, default: float = 10000.0) -> Config:
  """Replaces `rope_parameters`, of transformers 5, by the settings of version 4."""
  rope = config.pop("rope_parameters", None)
  config.setdefault("rope_theta", default)
  if rope is None:
    return config
  if not isinstance(rope, dict):
    raise ExportError(f"rope_parameters={rope!r:.80} is not an object.")
  rope = dict(rope)
  kind = rope.pop("rope_type", rope.pop("type", "default"))
  if kind != "default":
    raise ExportError(f"rope_parameters.rope_type={kind!r} is not implemented; only 'default'.")
  for name, value in rope.items():
    if name not in ("rope_theta", "partial_rotary_factor"):
      raise ExportError(f"rope_parameters.{name}={value!r:.80} is not a known setting.")
    config[name] = value
  return config


def whole_heads(config: Config) -> Config:
  """Checks a `head_dim` that must be D / H, and gives num_key_value_heads its default."""
  D, H = config.get("hidden_size"), config.get("num_attention_heads")
  if type(D) is not int or type(H) is not int or H < 1 or D % H:
    raise ExportError(f"hidden_size={D!r} is not a multiple of num_attention_heads={H!r}.")
  K = config.pop("head_dim", None)
  if K not in (None, D // H):
    raise ExportError(
      f"head_dim={K!r} is not implemented; only hidden_size / num_attention_heads = {D // H}, for "
      "values are as wide here."
    )
  if config.get("num_key_value_heads") is None:
    config["num_key_value_heads"] = H
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
    "rope_theta": number("mixer_options.rotary_base", 10000.0),
    "attention_bias": flag("mixer_options.use_bias", False),
    "mlp_bias": flag("channel_mixer_options.use_bias", False),
    "attention_dropout": number("mixer_options.attention_dropout", 0.0),
    "tie_word_embeddings": flag("tie_embeddings", False),
    "hidden_act": choice("channel_mixer_options.activation", {"silu": "silu"}, "silu"),
    "rope_scaling": Fixed(None),
  }
  | free("pretraining_tp"),
  normal=lambda config: rotary(whole_heads(config)),
  rows=TOP
  | linears(
    "blocks.mixer",
    f"{LAYER}.self_attn",
    q_proj="q_proj",
    k_proj="k_proj",
    v_proj="v_proj",
    o_proj="o_proj",
  )
  | linears(
    "blocks.channel_mixer", f"{LAYER}.mlp", gate="gate_proj", up="up_proj", down="down_proj"
  )
  | norm("blocks.mixer_norm", f"{LAYER}.input_layernorm")
  | norm("blocks.channel_norm", f"{LAYER}.post_attention_layernorm"),
  skipped=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)
