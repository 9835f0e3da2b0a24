"""RWKV-6 of fla, whose streams are in the order r, w, k, v, g; ours w, k, v, r, g."""

from lnssm_jax.pretrained.families.fields import Config, Field, Fixed, free, number, size, without
from lnssm_jax.pretrained.families.fla import (
  ATTN,
  ENDS,
  FIELDS,
  LAYER,
  ONE,
  RENAMED,
  boolean,
  normal,
)
from lnssm_jax.pretrained.families.table import (
  TRANSPOSED,
  Family,
  Row,
  Rows,
  View,
  by_heads,
  linears,
  norm,
)

_THEIRS, _OURS = "rwkvg", "wkvrg"


def _rows(attn: str, ffn: str) -> Rows:
  """Rows of the mixer at `attn` and of the channel mixer at `ffn`."""
  mixer, channel = "blocks.mixer", "blocks.channel_mixer"
  projections = {f"{name}_proj": f"{name}_proj.linear" for name in "rkvg"}
  return {
    f"{mixer}.mu_x": Row(f"{attn}.x_proj.0.mu"),
    **{f"{mixer}.mu_{name}": _mu(attn, i) for i, name in enumerate(_THEIRS)},
    f"{mixer}.mix_down_proj.kernel": [_down(attn, ours) for ours in range(5)],
    f"{mixer}.mix_up": [_up(attn, ours) for ours in range(5)],
    f"{mixer}.u": Row(f"{attn}.bonus", by_heads("rwkv6")),
    f"{mixer}.w": Row(f"{attn}.w_proj.linear.lora.2.bias"),
    f"{mixer}.decay_down_proj.kernel": Row(f"{attn}.w_proj.linear.lora.0.weight", TRANSPOSED),
    f"{mixer}.decay_up_proj.kernel": Row(f"{attn}.w_proj.linear.lora.2.weight", TRANSPOSED),
    **linears(mixer, attn, **projections, o_proj="o_proj"),
    **norm(f"{mixer}.norm", f"{attn}.g_norm"),
    f"{channel}.mu_k": Row(f"{ffn}.key.mu"),
    f"{channel}.mu_r": Row(f"{ffn}.receptance.mu"),
    **linears(channel, ffn, up="key.linear", gate="receptance.linear", down="value"),
  }


def _mu(attn: str, number: int) -> Row:
  return Row(f"{attn}.x_bias", View(lambda x: x[number], lambda s: (5, *s)))


def _down(attn: str, ours: int) -> Row:
  """The columns of one stream: [D, 5 R] here, [5 R, D] there."""
  theirs = _THEIRS.index(_OURS[ours])
  view = View(lambda x: x.reshape(5, -1, x.shape[-1])[theirs].T, lambda s: (5 * s[1], s[0]))
  part = lambda x: x.reshape(len(x), 5, -1)[:, ours]
  return Row(f"{attn}.x_proj.0.linear.weight", view, part)


def _up(attn: str, ours: int) -> Row:
  """[R, D] of one stream: [5, R, D] here, [D, 5 R] there."""
  theirs = _THEIRS.index(_OURS[ours])
  view = View(lambda x: x.reshape(len(x), 5, -1)[:, theirs].T, lambda s: (s[1], 5 * s[0]))
  return Row(f"{attn}.x_proj.2.weight", view, lambda x: x[ours])


def _rwkv6(config: Config) -> Config:
  config = normal(config, ratio=3.5, gated=False)
  config["norm"] = "layer" if boolean(config, "norm_bias", True) else "layer_without_bias"
  return config | {"g_norm_eps": config.get("norm_eps", 1e-5)}


def _rwkv6_written(config: Config) -> Config:
  return without(config, "norm", "g_norm_eps") | {"norm_bias": config["norm"] == "layer"}


RWKV6 = Family(
  name="rwkv6",
  layout="fla",
  architecture="RWKV6ForCausalLM",
  fields=FIELDS
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
    "use_glu": Fixed(False, written=False),
    "use_short_conv": Fixed(False, written=False),
    **free("of convolutions, of which there are none", "conv_size", "share_conv_kernel"),
  },
  constants={
    "mixer": "rwkv6",
    "channel_mixer": "rwkv6_channel_mix",
    "channel_mixer_options.mu_of": "previous",
    "embedding_norm": True,
  },
  rows=ENDS
  | norm("embedding_norm", "model.layers.0.pre_norm")
  | norm("blocks.channel_norm", f"{LAYER}.ffn_norm")
  | _rows(ATTN, f"{LAYER}.ffn"),
  normal=_rwkv6,
  written=_rwkv6_written,
  renamed=RENAMED | {"eps": "norm_eps"},
)
