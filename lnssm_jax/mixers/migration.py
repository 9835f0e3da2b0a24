"""Old names of mixer options and parameters, for configs and checkpoints that predate them.

    options = renamed_options("mamba", {"conv_width": 4})              # {"conv_size": 4}
    path = renamed_parameter("mamba", "dt_bias")                       # "dt_proj/bias"

Paths are those inside the mixer, joined by "/". Names that are not in the tables have not changed.
The function `divide_time` is now `shard_time`.
"""

from collections.abc import Mapping
from typing import Any

_GATE = {"gate_temperature": "gate_logit_normalizer"}
_CONV = {"conv_width": "conv_size"}
_KEYS = {"key_dim": "head_dim"}
_CACHE = {"kv_heads": "num_kv_heads"}

# {mixer: {old option: new option}}
RENAMED_OPTIONS: dict[str, dict[str, str]] = {
  "base_conv": _CONV,
  "based": _KEYS,
  "delta_net": _CONV,
  "gated_delta_net": _CONV,
  "gfw": _KEYS | _GATE,
  "gla": _GATE,
  "gsa": _GATE,
  "hyena": _CONV,
  "longhorn": _CONV | {"rate_rank": "gate_rank"},
  "longhorn_exact": _CONV | {"rate_rank": "gate_rank"},
  "mamba": _CONV | {"step_rank": "gate_rank"},
  "mamba2": _CONV,
  "metala": _CONV | _GATE,
  "normalized_attention": _KEYS,
  "qlstm": _CONV,
  "qlstm_reversed": _CONV,
  "rg_lru": _CONV,
  "rwkv6": {"decay_rank": "gate_rank"},
  "sliding_window_attention": _CACHE,
  "softmax_attention": _CACHE,
}


def _biases(names: str) -> dict[str, str]:
  """A bias `q_bias` next to its projection `q_proj` became `q_proj/bias`."""
  return {f"{name}_bias": f"{name}_proj/bias" for name in names.split()}


_NORM = {"norm_gain": "norm/scale", "norm_bias": "norm/bias"}
_QKVO = _biases("q k v o")

# {mixer: {old path: new path}}
RENAMED_PARAMETERS: dict[str, dict[str, str]] = {
  "base_conv": _biases("g"),
  "cosformer": _QKVO,
  "delta_net": _NORM,
  "dss": _biases("o"),
  "gated_delta_net": _NORM | {"dt_bias": "a_proj/bias"},
  "gateloop": _NORM | _biases("a p"),
  "gfw": _NORM,
  "gla": _NORM | {"decay_bias": "decay_up_proj/bias"},
  "gsa": _NORM,
  "hgrn": _NORM | _biases("c f g"),
  "hgrn2": _NORM | _biases("q f v"),
  "linear_attention": _QKVO,
  "lln": _QKVO,
  "longhorn": _biases("beta"),
  "longhorn_exact": _biases("beta"),
  "lrn": _biases("f i g"),
  "lrpe": _NORM | _QKVO,
  "mamba": _biases("dt"),
  "mamba2": _NORM,
  "metala": _biases("g"),
  "normalized_attention": _QKVO | _biases("eta"),
  "qlstm": {"gate_bias": "x_proj/bias"},
  "qlstm_reversed": {"gate_bias": "x_proj/bias"},
  "retnet": _NORM,
  "rwkv5": _NORM,
  "rwkv6": _NORM,
  "s4": _biases("o"),
  "s4d": _biases("o"),
  "s5": _biases("g"),
  "sliding_window_attention": _QKVO,
  "softmax_attention": _QKVO,
  "tnl": _NORM,
  "tnn": _biases("u v o"),
}


def renamed_options(mixer: str, options: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the options of a mixer under their current names."""
  names = RENAMED_OPTIONS.get(mixer, {})
  return {names.get(name, name): value for name, value in options.items()}


def renamed_parameter(mixer: str, path: str) -> str:
  """Returns the current path of a mixer's parameter, "q_proj/bias" for "q_bias"."""
  return RENAMED_PARAMETERS.get(mixer, {}).get(path, path)
