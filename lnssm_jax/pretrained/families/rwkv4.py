"""RWKV-4, of transformers."""

from lnssm_jax.pretrained.families.fields import Config, Fixed, flag, free, same, size, whole
from lnssm_jax.pretrained.families.table import TRANSPOSED, TWO_AXES, Family, Row, linears, norm

_LAYER = "rwkv.blocks.{}"
_ATTENTION, _FEED_FORWARD = f"{_LAYER}.attention", f"{_LAYER}.feed_forward"


def _normal(config: Config) -> Config:
  dim = whole(config, "hidden_size")
  if config.get("intermediate_size") is None:
    config["intermediate_size"] = 4 * dim
  return config


RWKV4 = Family(
  name="rwkv",
  layout="hf",
  architecture="RwkvForCausalLM",
  fields={
    "vocab_size": size("vocab_size"),
    "hidden_size": size("dim"),
    "num_hidden_layers": size("num_layers"),
    "intermediate_size": size("channel_hidden"),
    "tie_word_embeddings": flag("tie_embeddings", False),
    "attention_hidden_size": same("hidden_size"),
    "layer_norm_epsilon": Fixed(1e-5),  # that of the last norm cannot be another
    **free("of training data; no position is stored", "context_length", "max_position_embeddings"),
    **free("to stay within float16: powers of two, which the norms take out", "rescale_every"),
  },
  constants={
    "mixer": "rwkv4",
    "channel_mixer": "rwkv4_channel_mix",
    "norm": "layer",
    "norm_eps": 1e-5,
    "embedding_norm": True,
    "num_heads": None,
  },
  rows={
    "embedding": Row("rwkv.embeddings.weight"),
    "head.kernel": Row("head.weight", TRANSPOSED),
    **norm("embedding_norm", "rwkv.blocks.0.pre_ln"),
    **norm("norm", "rwkv.ln_out"),
    **norm("blocks.mixer_norm", f"{_LAYER}.ln1"),
    **norm("blocks.channel_norm", f"{_LAYER}.ln2"),
    "blocks.mixer.w": Row(f"{_ATTENTION}.time_decay"),
    "blocks.mixer.u": Row(f"{_ATTENTION}.time_first"),
    **{
      f"blocks.mixer.mu_{name[0]}": Row(f"{_ATTENTION}.time_mix_{name}", TWO_AXES)
      for name in ("receptance", "key", "value")
    },
    **{
      f"blocks.channel_mixer.mu_{name[0]}": Row(f"{_FEED_FORWARD}.time_mix_{name}", TWO_AXES)
      for name in ("receptance", "key")
    },
    **linears(
      "blocks.mixer",
      _ATTENTION,
      r_proj="receptance",
      k_proj="key",
      v_proj="value",
      o_proj="output",
    ),
    **linears("blocks.channel_mixer", _FEED_FORWARD, gate="receptance", up="key", down="value"),
  },
  normal=_normal,
)
