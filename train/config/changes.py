"""Settings that a resumed run may change, and the differences between two configs."""

from typing import Any

from train.config.loading import to_dict
from train.config.schema import Train

# Settings that a resumed run may change: they affect the result of a step by rounding only, except
# `steps`, without which no run could be extended.
FREE = (
  "steps",
  "accumulate",
  "checkpoint_every",
  "eval_every",
  "log_every",
  "keep_checkpoints",
  "max_skipped",
  "loss_chunk",
  "watch",
  "compile_cache",
  "sample",
  "mesh",
  "model.remat",
  "model.unroll",
)


def differences(old: Train, new: Train) -> dict[str, str]:
  """Describes the settings in which two configs differ: {setting: "setting: old and new value"}."""
  before, now = (dict(_flatten(to_dict(c))) for c in (old, new))
  lines = {}
  for name in sorted(before.keys() | now.keys()):
    a, b = (repr(values[name]) if name in values else "nothing" for values in (before, now))
    if a != b and name != "run_dir":
      lines[name] = f"{name}: the folder's run has {a}, this one {b}"
  return lines


def is_free(name: str) -> bool:
  """Whether a resumed run may change the setting `name`."""
  return any(name == free or name.startswith(f"{free}.") for free in FREE)


def _flatten(values: dict[str, Any], prefix: str = ""):
  for name, value in values.items():
    if isinstance(value, dict) and value:
      yield from _flatten(value, f"{prefix}{name}.")
    else:
      yield prefix + name, value
