"""RecurrentGemma, of transformers."""

import ml_dtypes
import numpy as np

from lnssm_jax.ops.core.checks import is_number
from lnssm_jax.pretrained.families.fields import (
  Config,
  Field,
  Fixed,
  Same,
  choice,
  flag,
  free,
  number,
  size,
  whole,
  without,
)
from lnssm_jax.pretrained.families.llama import rotary, whole_heads
from lnssm_jax.pretrained.families.table import (
  GATED_MLP,
  QKVO,
  TRANSPOSED,
  Family,
  Row,
  Rows,
  by_heads,
  convolution,
  linears,
  norm,
)
from lnssm_jax.pretrained.manifest import ExportError

_BLOCKS = {"recurrent": "rg_lru", "attention": "sliding_window_attention"}
_LAYER = "model.layers.{}"
_TEMPORAL = f"{_LAYER}.temporal_block"
_LRU, _ATTENTION = "mixer_options.rg_lru", "mixer_options.sliding_window_attention"


_ACTIVATION = "gelu_pytorch_tanh"
# Names of a layer's kind in `layer_types`, by those in `block_types`.
_KINDS = {"recurrent": "linear_attention", "attention": "sliding_attention"}


def _normal(config: Config) -> Config:
  config = rotary(whole_heads(config))
  dim, H, L = (
    config["hidden_size"],
    config["num_attention_heads"],
    whole(config, "num_hidden_layers"),
  )
  types = config.pop("block_types", None) or ["recurrent", "recurrent", "attention"]
  if not isinstance(types, list) or any(x not in _BLOCKS for x in map(str, types)):
    raise ExportError(f"block_types={types!r:.80} must be a list of {', '.join(_BLOCKS)}.")
  if len(types) > L:
    raise ExportError(f"num_hidden_layers={L} must be at least the {len(types)} block_types.")
  _check_layers(config, types, L)
  width = whole(config, "intermediate_size", 7680)
  if width % 2:
    raise ExportError(f"intermediate_size={width} must be even: the gate has half of it.")
  share = config.pop("partial_rotary_factor", 0.5)
  if not is_number(share) or not 0 < share <= 1 or share * (dim // H) % 2:
    raise ExportError(f"partial_rotary_factor={share!r:.80} must give an even number of channels.")
  # The factor is a bfloat16 there, whatever the dtype of the model.
  scale = float(np.sqrt(dim).astype(ml_dtypes.bfloat16))
  pattern = [_BLOCKS[x] for x in types]
  derived = {"mixers": pattern, "gate_width": width // 2, "embedding_scale": scale}
  if config.get("lru_width") is None:
    config["lru_width"] = dim
  whole(config, "attention_window_size", 2048)
  return without(config, "intermediate_size") | derived | {"rotary_width": int(share * (dim // H))}


def _check_layers(config: Config, types: list[str], L: int) -> None:
  """Checks other lists of the layers' kinds, each of all layers or of a pattern that repeats."""
  for name in ("_block_types", "layers_block_type", "layer_types"):
    given = config.pop(name, None)
    if given is None:
      continue
    given = given if isinstance(given, list) and 0 < len(given) <= L else [given]
    period = range(min(L, len(types) * len(given)))  # after which both repeat
    kinds = [(types[i % len(types)], str(given[i % len(given)])) for i in period]
    if any(theirs not in (kind, _KINDS[kind]) for kind, theirs in kinds):
      raise ExportError(
        f"{name}={given!r:.80} is not what block_types={types!r:.80} says of "
        f"num_hidden_layers={L}; correct the one that is wrong."
      )


def _written(config: Config) -> Config:
  names = {ours: theirs for theirs, ours in _BLOCKS.items()}
  width, K = config["rotary_width"], config["hidden_size"] // config["num_attention_heads"]
  own = {
    "block_types": [names.get(x) for x in config["mixers"]],
    "intermediate_size": 2 * config["gate_width"],
    "partial_rotary_factor": width / K,
  }
  return without(config, "mixers", "gate_width", "rotary_width", "embedding_scale") | own


_ROWS: Rows = {
  "embedding": Row("model.embed_tokens.weight"),
  "head.kernel": Row("lm_head.weight", TRANSPOSED),
  **norm("norm", "model.final_norm"),
  **norm("blocks.mixer_norm", f"{_LAYER}.temporal_pre_norm"),
  **norm("blocks.channel_norm", f"{_LAYER}.channel_pre_norm"),
  **linears("blocks.channel_mixer", f"{_LAYER}.mlp_block", **GATED_MLP),
  **linears("blocks.sliding_window_attention", _TEMPORAL, **QKVO),
  **linears("blocks.rg_lru", _TEMPORAL, x_proj="linear_x", y_proj="linear_y", o_proj="linear_out"),
  **convolution("blocks.rg_lru.conv", f"{_TEMPORAL}.conv_1d"),
  "blocks.rg_lru.decay_rate": Row(f"{_TEMPORAL}.rg_lru.recurrent_param"),
  "blocks.rg_lru.decay_gate.kernel": Row(f"{_TEMPORAL}.rg_lru.recurrent_gate_weight"),
  "blocks.rg_lru.decay_gate.bias": Row(
    f"{_TEMPORAL}.rg_lru.recurrent_gate_bias", by_heads("rg_lru")
  ),
  "blocks.rg_lru.input_gate.kernel": Row(f"{_TEMPORAL}.rg_lru.input_gate_weight"),
  "blocks.rg_lru.input_gate.bias": Row(f"{_TEMPORAL}.rg_lru.input_gate_bias", by_heads("rg_lru")),
}

RECURRENT_GEMMA = Family(
  name="recurrent_gemma",
  layout="hf",
  architecture="RecurrentGemmaForCausalLM",
  fields={
    "vocab_size": size("vocab_size"),
    "hidden_size": size("dim"),
    "num_hidden_layers": size("num_layers"),
    "num_attention_heads": size("num_heads"),
    "num_key_value_heads": size(f"{_ATTENTION}.num_kv_heads"),
    "attention_window_size": size(f"{_ATTENTION}.window", 2048),
    "attention_bias": choice(f"{_ATTENTION}.use_bias", {False: "o", True: True}, False),
    "attention_dropout": number(f"{_ATTENTION}.attention_dropout", 0.0),
    "rope_theta": number(f"{_ATTENTION}.rotary_base"),
    "rotary_width": size(f"{_ATTENTION}.rotary_width"),
    "lru_width": size(f"{_LRU}.width"),
    "conv1d_width": size(f"{_LRU}.conv_size", 4),
    "mixers": Field("mixer", (list,)),
    "gate_width": size("channel_hidden"),
    "embedding_scale": number("embedding_scale"),
    "logits_soft_cap": number("logit_soft_cap", 30.0),
    "rms_norm_eps": number("norm_eps", 1e-6),
    "tie_word_embeddings": flag("tie_embeddings", True),
    "hidden_activation": choice(
      "channel_mixer_options.activation",
      {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu"},
      _ACTIVATION,
    ),
    "rope_scaling": Fixed(None),
    "hidden_act": Same("hidden_activation", lambda c: c.get("hidden_activation", _ACTIVATION)),
    "embeddings_scale_by_sqrt_dim": Fixed(True, written=False),
    **free("of random parameters", "final_w_init_variance_scale", "w_init_variance_scale"),
    **free("of training data; attention has a window", "max_position_embeddings"),
  },
  renamed={"sliding_window": "attention_window_size"},
  constants={
    f"{_LRU}.use_bias": True,
    "channel_mixer": "geglu",
    "channel_mixer_options.use_bias": True,
    "norm": "rms_from_zero",
    "embedding_norm": False,
  },
  rows=_ROWS,
  normal=_normal,
  written=_written,
)
