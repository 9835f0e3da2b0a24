"""Agreement of the processes of a run on everything that determines its numbers, before it starts.

Processes with other settings, text, code or packages would train replicas that differ, or wait for
each other forever.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import lnssm_jax
import train
from lnssm_jax.files.printable import PrintableError
from train.cluster import distributed
from train.config.changes import flatten
from train.config.versions import versions

_MOST = 8  # differences that are listed


class DisagreementError(PrintableError, ValueError):
  """The processes of a run differ; the message names one that does, the fields and both values."""


def check(values: Callable[[], dict[str, Any]]) -> None:
  """Compares the JSON that `values` returns over all processes, which must all call this.

  One collective of 32 bytes per process if they agree.

  Raises:
    DisagreementError: a process differs from process 0. Raised in all processes.
  """
  if distributed.count() == 1:
    return
  from jax.experimental import multihost_utils

  mine = dict(flatten(values()))
  digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).digest()
  digests = multihost_utils.process_allgather(np.frombuffer(digest, np.uint8))
  others = np.flatnonzero((digests != digests[0]).any(1))
  if others.size:
    other = int(others[0])
    expected, found = distributed.from_process(0, mine), distributed.from_process(other, mine)
    raise DisagreementError(*disagreement(other, expected, found).split("\n"))


def disagreement(process: int, expected: Mapping[str, Any], found: Mapping[str, Any]) -> str:
  """Message for a process with the flat values `found` instead of those of process 0."""
  names = sorted(expected.keys() | found.keys())
  show = lambda values, name: repr(values[name]) if name in values else "nothing"
  lines = [
    f"{name}: {show(expected, name)} in process 0, {show(found, name)} in process {process}"
    for name in names
    if name not in expected or name not in found or expected[name] != found[name]
  ]
  more = [f"... and {len(lines) - _MOST} more"] if len(lines) > _MOST else []
  return (
    "the processes of this run differ, so none of them trains:\n  "
    + "\n  ".join(lines[:_MOST] + more)
    + "\nStart all of them with the same command, files and packages."
  )


def software() -> dict[str, Any]:
  """Versions of the packages, and a digest of the source files of this process."""
  digest = hashlib.sha256()
  library, stack = (Path(module.__file__ or "").parent for module in (lnssm_jax, train))
  for root in (library, library.with_name("pallas_kernels"), stack):
    for path in sorted(root.rglob("*.py")):
      content = path.read_bytes()
      digest.update(f"{path.relative_to(root.parent)} {len(content)}\n".encode() + content)
  return {"versions": versions(), "code": digest.hexdigest(), "x64": jax.config.jax_enable_x64}
