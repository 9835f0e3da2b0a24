"""The rows of fla's RWKV-6, whose streams are in the order r, w, k, v, g; ours w, k, v, r, g."""

from lnssm_jax.pretrained.families.table import (
  TRANSPOSED,
  Row,
  Rows,
  View,
  by_heads,
  linears,
  norm,
)

_THEIRS, _OURS = "rwkvg", "wkvrg"


def rwkv6_rows(attn: str, ffn: str) -> Rows:
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
