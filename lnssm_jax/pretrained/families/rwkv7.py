"""RWKV-7 (World, G1) of fla. Its first layer has no values to mix with, and no tensors for that."""

from lnssm_jax.pretrained.families.fields import (
  Config,
  Field,
  Fixed,
  agree,
  count_of_layers,
  number,
  size,
  whole,
  without,
)
from lnssm_jax.pretrained.families.fla import ATTN, ENDS, FIELDS, LAYER, RENAMED, boolean, normal
from lnssm_jax.pretrained.families.table import (
  TWO_AXES,
  Family,
  Row,
  Rows,
  by_heads,
  linear,
  linears,
  norm,
)
from lnssm_jax.pretrained.manifest import ExportError

_MIXER, _CHANNEL = "blocks.mixer", "blocks.channel_mixer"
# {name of ours: of theirs}, of which there is a product of two matrices each
_NARROW = {"decay": "w", "rate": "a", "value": "v", "gate": "g"}


def _low_rank(ours: str, theirs: str) -> Rows:
  since = 1 if ours == "value" else 0
  rows = linear(f"{_MIXER}.{ours}_down_proj", f"{ATTN}.{theirs}_lora.lora.0")
  rows |= linear(f"{_MIXER}.{ours}_up_proj", f"{ATTN}.{theirs}_lora.lora.2")
  return {name: row._replace(since=since) for name, row in rows.items() if isinstance(row, Row)}


def _rwkv7(config: Config) -> Config:
  D, K = whole(config, "hidden_size"), config.pop("head_dim", 64)
  if K is None:
    K = D // whole(config, "num_heads")
  if D % whole({"head_dim": K}, "head_dim"):
    raise ExportError(f"hidden_size={D} must be a multiple of head_dim={K}.")
  config["num_heads"] = D // K  # whatever it says, as in fla
  values = config.pop("value_dim", None)
  L = count_of_layers(config)
  agree({"value_dim": values}, "value_dim", D if type(values) is int else [D] * L, "hidden_size")
  config = normal(config, gated=False)
  config["norm"] = "layer" if boolean(config, "norm_bias", True) else "layer_without_bias"
  return config


def _rwkv7_written(config: Config) -> Config:
  K = config["hidden_size"] // config["num_heads"]
  return without(config, "norm") | {"norm_bias": config["norm"] == "layer", "head_dim": K}


RWKV7 = Family(
  name="rwkv7",
  layout="fla",
  architecture="RWKV7ForCausalLM",
  fields=FIELDS
  | {
    "norm": Field("norm", (str,)),
    "norm_eps": number(("norm_eps", "mixer_options.norm_eps"), 1e-5),
    "decay_low_rank_dim": size("mixer_options.decay_rank", 64),
    "a_low_rank_dim": size("mixer_options.rate_rank", 64),
    "v_low_rank_dim": size("mixer_options.value_rank", 16),
    "gate_low_rank_dim": size("mixer_options.gate_rank", 128),
    "hidden_act": Fixed("sqrelu"),
    "norm_first": Fixed(True),
  },
  constants={
    "mixer": "rwkv7",
    "channel_mixer": "rwkv7_channel_mix",
    "channel_mixer_options.mu_of": "previous",
    "embedding_norm": True,
  },
  rows=ENDS
  | norm("embedding_norm", "model.layers.0.pre_norm")
  | norm("blocks.channel_norm", f"{LAYER}.ffn_norm")
  | {f"{_MIXER}.mu_{x}": Row(f"{ATTN}.x_{x}", TWO_AXES) for x in "rwkvag"}
  | {
    f"{_MIXER}.erase_gain": Row(f"{ATTN}.k_k"),
    f"{_MIXER}.rate_gain": Row(f"{ATTN}.k_a"),
    f"{_MIXER}.bonus_gain": Row(f"{ATTN}.r_k", by_heads("rwkv7")),
    f"{_CHANNEL}.mu_k": Row(f"{LAYER}.ffn.x_k"),
  }
  | linears(_MIXER, ATTN, **{f"{x}_proj": f"{x}_proj" for x in "rkvo"})
  | norm(f"{_MIXER}.norm", f"{ATTN}.g_norm")
  | {name: row for ours, x in _NARROW.items() for name, row in _low_rank(ours, x).items()}
  | linears(_CHANNEL, f"{LAYER}.ffn", up="key", down="value"),
  normal=_rwkv7,
  written=_rwkv7_written,
  renamed=RENAMED,
)
