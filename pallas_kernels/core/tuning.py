"""Configurations of kernels: the tables of devices, and the check of SMEM.

An op's `config.py` has its frozen configurations, one value per kernel, and `default`, which
chooses them by shape and device. `python -m benchmarks.tune` measures others, and writes what is
faster to a table of the device, `pallas_kernels/tuned/<kind>.json`: by op and shape class the
fields in which the tuned configuration differs. A shape class never has a sequence's length.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pallas_kernels.core import device

FOLDER = Path(__file__).parents[1] / "tuned"


def table_path(kind: str) -> Path:
  """Where the table of a kind of device is, or would be."""
  return FOLDER / f"{re.sub(r'[^a-z0-9]+', '-', kind.lower()).strip('-')}.json"


@functools.cache
def table(path: Path) -> Mapping[str, Any]:
  """The table in a file; empty if there is none."""
  return json.loads(path.read_text()) if path.exists() else {}


def tuned[Config](op: str, shape_class: str, default: Config) -> Config:
  """`default` with the fields that the current device's table has for this op and shape class."""
  path = table_path(device.current().kind)
  changes = table(path).get(op, {}).get(shape_class, {})
  return replaced(default, changes, f"{path}: {op}, {shape_class}")


def replaced(config: Any, changes: Mapping[str, Any], where: str) -> Any:
  """`config` with other fields; those of a configuration within it by a mapping.

  Raises:
    ValueError: there is no such field.
  """
  known = [field.name for field in dataclasses.fields(config)]
  values = {}
  for name, value in changes.items():
    if name not in known:
      raise ValueError(f"{where}: no field is named {name!r}; use one of {', '.join(known)}.")
    inner = getattr(config, name)
    if dataclasses.is_dataclass(inner):
      value = replaced(inner, value, f"{where}, {name}")
    values[name] = value
  return dataclasses.replace(config, **values)


def check_smem(op: str, smem: Mapping[str, int]) -> None:
  """Raises a ValueError if a kernel needs more bytes of SMEM than a CTA can have."""
  gpu = device.current()
  for kernel, size in smem.items():
    if size > gpu.smem:
      raise ValueError(
        f"{op}: the kernel {kernel!r} needs {size} bytes of SMEM per CTA, and the {gpu.kind} has "
        f"{gpu.smem}; use fewer stages or smaller tiles."
      )


def ctas_per_sm(smem: int) -> int:
  """CTAs with so many bytes of SMEM that an SM has room for; registers may allow fewer."""
  gpu = device.current()
  return next(n for n in range(32, 0, -1) if n == 1 or gpu.smem_of_each(n) >= smem)
