"""Hybrids of flash-linear-attention: its families with attention in some layers (`attn`)."""

import dataclasses
from typing import Any

from lnssm_jax.pretrained.families import fla
from lnssm_jax.pretrained.families.fields import Config, Field, choice, number, size, size_or_none
from lnssm_jax.pretrained.families.hybrids import pattern
from lnssm_jax.pretrained.families.rwkv6 import RWKV6
from lnssm_jax.pretrained.families.table import QKVO, Family, linears
from lnssm_jax.pretrained.manifest import ExportError

_ATTENTION = "mixer_options.softmax_attention"
_LAYERS = "mixers"
_USUAL = {"num_kv_heads": None, "qkv_bias": False, "window_size": None, "rope_theta": 10000.0}
_FIELDS = {
  _LAYERS: Field("mixer", (list,)),
  "max_position_embeddings": size(f"{_ATTENTION}.max_length", 2048),
  "attn.num_heads": size(f"{_ATTENTION}.num_heads"),
  "attn.num_kv_heads": size(f"{_ATTENTION}.num_kv_heads"),
  "attn.qkv_bias": choice(f"{_ATTENTION}.use_bias", {False: False, True: "qkv"}),
  "attn.window_size": size_or_none(f"{_ATTENTION}.window"),
  "attn.rope_theta": number(f"{_ATTENTION}.rotary_base"),
}


def _normal(family: Family, config: Config) -> Config:
  """Writes `attn` out as settings of its own, and the pattern of mixers."""
  given, config = config.pop("attn"), family.normal(config)
  attn = given[0] if isinstance(given, list) and len(given) == 1 else given
  if not isinstance(attn, dict):
    raise ExportError(f"attn={given!r:.80} is not implemented; only one object.")
  attn = _USUAL | attn
  chosen, L = attn.pop("layers", None), config.get("num_hidden_layers")
  known = type(L) is int and 0 < L < 10_000 and isinstance(chosen, list)
  if not known or any(type(layer) is not int or not 0 <= layer < L for layer in chosen):
    raise ExportError(f"attn.layers={chosen!r:.80} must be a list, of num_hidden_layers={L!r:.80}.")
  if not 0 < len(set(chosen)) < L or len(set(chosen)) < len(chosen):
    raise ExportError(f"attn.layers={chosen!r:.80} must be some of the layers, each once.")
  own = family.constants["mixer"]
  config[_LAYERS] = pattern(["softmax_attention" if i in chosen else own for i in range(L)])
  attn["num_kv_heads"] = attn["num_kv_heads"] or attn.get("num_heads")
  return config | {f"attn.{name}": value for name, value in attn.items()}


def _written(family: Family, config: Config) -> Config:
  """The inverse of `_normal`."""
  mixers, attn = (
    config.pop(_LAYERS),
    {name: config.pop(f"attn.{name}") for name in ("num_heads", *_USUAL)},
  )
  attention = [mixer == "softmax_attention" for mixer in mixers]
  chosen = [i for i in range(config["num_hidden_layers"]) if attention[i % len(mixers)]]
  return family.written(config) | {"attn": {"layers": chosen, **attn}}


def _hybrid(family: Family, **fields: Any) -> Family:
  """A family of the same name, some of whose layers are attention."""
  mixer = family.constants["mixer"]
  inner = lambda path: path.replace("mixer_options.", f"mixer_options.{mixer}.", 1)
  # `channel_mixer_options` are those of all layers.
  moved = lambda path: inner(path) if path.startswith("mixer_options.") else path
  own = lambda path: (
    (moved("mixer_options.num_heads"), path) if path == "num_heads" else (moved(path),)
  )

  def field(found):
    if not isinstance(found, Field):
      return found
    return dataclasses.replace(found, ours=tuple(p for path in found.paths for p in own(path)))

  rows = {
    name.replace("blocks.mixer.", f"blocks.{mixer}."): row for name, row in family.rows.items()
  }
  base = {name: field(x) for name, x in (family.fields | fields).items() if name != "attn"}
  return dataclasses.replace(
    family,
    fields=base | _FIELDS,
    constants={moved(path): x for path, x in family.constants.items() if path != "mixer"},
    rows=rows | linears("blocks.softmax_attention", fla.ATTN, **QKVO),
    normal=lambda config: _normal(family, config),
    written=lambda config: _written(family, config),
  )


# One table of HGRN2's bounds has rows for attention layers too, which have no place here.
_NO_BOUNDS = choice("mixer_options.lower_bound", {False: "none"}, True)

FLA_HYBRIDS = (
  *map(_hybrid, (fla.GLA, fla.RETNET, fla.DELTA_NET, fla.GATED_DELTANET, fla.GSA, RWKV6)),
  _hybrid(fla.HGRN2, use_lower_bound=_NO_BOUNDS),
)
