"""Qwen2, Qwen3 and Mistral, of transformers: Llama with biases, norms of the heads, or a window."""

import dataclasses
from typing import Any

from lnssm_jax.pretrained.families.fields import (
  Config,
  Fixed,
  count_of_layers,
  flag,
  number,
  size_or_none,
  whole,
  without,
)
from lnssm_jax.pretrained.families.llama import LAYER, LLAMA, heads, rotary
from lnssm_jax.pretrained.families.table import Family, norm
from lnssm_jax.pretrained.manifest import ExportError

_FULL, _SLIDING = "full_attention", "sliding_attention"
# All but those of Llama alone.
_SHARED = without(LLAMA.fields, "attention_bias", "mlp_bias", "pretraining_tp", "is_llama_config")
_WINDOW = {"sliding_window": size_or_none("mixer_options.window")}


def _windows(config: Config) -> Config:
  """Writes out the window: that of all layers, or None.

  Layers from `max_window_layers` on have one where `use_sliding_window` is true.
  """
  L, uses = count_of_layers(config), config.pop("use_sliding_window", False)
  window, first = config.pop("sliding_window", 4096), config.pop("max_window_layers", 28)
  if not isinstance(uses, bool) or type(first) is not int:
    raise ExportError(
      f"use_sliding_window={uses!r:.80} must be a boolean and max_window_layers={first!r:.80} a "
      "number."
    )
  window = _WINDOW["sliding_window"].read("sliding_window", window)
  window = window if uses else None
  usual = [_SLIDING if window is not None and i >= first else _FULL for i in range(L)]
  types = config.pop("layer_types", None)
  types = usual if types is None else types
  if types not in ([_FULL] * L, [_SLIDING] * L):
    raise ExportError(
      f"layer_types={types!r:.80} with max_window_layers={first}: layers with a window next to "
      "others without are not implemented; only all or none of num_hidden_layers."
    )
  if types[0] == _SLIDING and window is None:
    raise ExportError(f"layer_types={types!r:.80} have a window, but use_sliding_window is false.")
  return config | {"sliding_window": window if types[0] == _SLIDING else None}


def _windows_written(config: Config) -> Config:
  uses = config["sliding_window"] is not None
  windows = {"use_sliding_window": uses, "max_window_layers": 0 if uses else 28}
  return LLAMA.written(config) | windows


def _whole_chunk(config: Config) -> int | None:
  """The most tokens that dual chunk attention does not change, those of its first chunk."""
  chunks = config.get("dual_chunk_attention_config")
  if chunks is None:
    return None
  try:
    size, local = (whole(chunks, name) for name in ("chunk_size", "local_size"))
    original = whole(chunks, "original_max_position_embeddings", size)
  except (AttributeError, ExportError) as error:
    raise ExportError(f"dual_chunk_attention_config={chunks!r:.80}: {error}") from None
  if local >= size:
    raise ExportError(
      f"dual_chunk_attention_config={chunks!r:.80} needs a chunk_size above its local_size."
    )
  return min(size - local, original)


def _qwen2(config: Config) -> Config:
  if (longest := _whole_chunk(config)) is not None:
    del config["dual_chunk_attention_config"]
    config["max_position_embeddings"] = min(longest, whole(config, "max_position_embeddings"))
  return _normal(32768, 32)(config)


def _normal(usual_length: int, groups: int, *, window: bool = False, **defaults: Any):
  """A function for `Family.normal`, with the defaults of a class."""

  def normal(config: Config) -> Config:
    config = {"num_key_value_heads": groups, **defaults} | config
    config = {"sliding_window": 4096} | config if window else _windows(config)
    config.setdefault("max_position_embeddings", usual_length)
    return rotary(heads(config), usual_length=usual_length)

  return normal


def _dense(name: str, **changes: Any) -> Family:
  """Llama's table, with another class and with `changes`."""
  architecture = f"{name.capitalize()}ForCausalLM"
  fields = _SHARED | _WINDOW | changes.pop("fields", {})
  constants = LLAMA.constants | changes.pop("constants", {})
  return dataclasses.replace(
    LLAMA, name=name, architecture=architecture, fields=fields, constants=constants, **changes
  )


QWEN2 = _dense(
  "qwen2",
  # Saved with Qwen2.5; rotations of three axes are of its models of images.
  fields={"use_mrope": Fixed(False, written=False)},
  constants={"mixer_options.use_bias": "qkv"},
  normal=_qwen2,
  written=_windows_written,
  longest=_whole_chunk,
)
QWEN3 = _dense(
  "qwen3",
  constants={"mixer_options.qk_norm": True},
  fields={
    "attention_bias": flag("mixer_options.use_bias", False),
    "rms_norm_eps": number(("norm_eps", "mixer_options.norm_eps"), 1e-6),
  },
  rows=LLAMA.rows
  | norm("blocks.mixer.q_norm", f"{LAYER}.self_attn.q_norm")
  | norm("blocks.mixer.k_norm", f"{LAYER}.self_attn.k_norm"),
  normal=_normal(32768, 32, head_dim=128),
  written=_windows_written,
)
MISTRAL = _dense("mistral", normal=_normal(131072, 8, window=True))
