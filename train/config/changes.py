"""Settings that a resumed run may change, and the differences between two configs."""

from collections.abc import Iterator
from typing import Any

from lnssm_jax.pretrained.manifest import SAME_FUNCTION
from train.config.loading import to_dict

# Settings that a resumed run may change: they affect the result of a step by rounding only, except
# `steps`, without which no run could be extended.
FREE = (
  "steps",
  "accumulate",
  "checkpoint_every",
  "eval_every",
  "eval_at_start",
  "log_every",
  "keep_checkpoints",
  "max_skipped",
  "loss_chunk",
  "watch",
  "callbacks",
  "run_name",
  "run_group",
  "run_tags",
  "compile_cache",
  "sample",
  "mesh",
  "model.remat",
  "model.unroll",
  "workers",
)


def differences(old: Any, new: Any) -> dict[str, str]:
  """Describes the settings in which two configs differ: {setting: "setting: old and new value"}."""
  before, now = (dict(flatten(to_dict(c))) for c in (old, new))
  lines = {}
  for name in sorted(before.keys() | now.keys()):
    a, b = (repr(values[name]) if name in values else "nothing" for values in (before, now))
    if a != b and name != "run_dir":
      lines[name] = f"{name}: the folder's run has {a}, this one {b}"
  return lines


def is_free(name: str) -> bool:
  """Whether a resumed run may change the setting `name`."""
  return any(name == free or name.startswith(f"{free}.") for free in FREE)


def model_differences(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
  """Settings in which two models compute different functions: {setting: (old, new value)}."""
  before, now = to_dict(old), to_dict(new)
  return {
    name: (before[name], now[name])
    for name in now
    if name not in SAME_FUNCTION and before[name] != now[name]
  }


def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
  """Pairs of path and value of a nested dictionary: ("model.dim", 512)."""
  for name, value in values.items():
    if isinstance(value, dict) and value:
      yield from flatten(value, f"{prefix}{name}.")
    else:
      yield prefix + name, value
