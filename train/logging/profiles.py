"""Where a device's time goes: the operations of a profiler trace, summed by part of the model."""

import collections
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import jax
from jax.profiler import ProfileData

from lnssm_jax.ops.core import dispatch

_CONTROL = ("while", "conditional", "call")  # their bodies have events of their own


class Event(NamedTuple):
  """One execution of one operation of a compiled program."""

  kernel: str
  instruction: str  # of the compiled program
  seconds: float


def read(folder: str | Path) -> list[Event]:
  """The operations in the newest trace below a folder: of its GPUs, or else of its CPU.

  Raises:
    FileNotFoundError: there is no trace.
  """
  files = sorted(Path(folder).rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
  if not files:
    raise FileNotFoundError(f"{folder} has no trace (*.xplane.pb).")
  found = []
  with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # as an error it would abort the process
    profile = ProfileData.from_file(str(files[-1]))  # its parts do not live longer
    planes = list(profile.planes)
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    for plane in gpus or planes:
      for line in plane.lines:
        if not gpus or line.name.startswith("Stream"):
          for event in line.events:
            instruction = dict(event.stats).get("hlo_op", event.name if gpus else None)
            if instruction is not None and not str(instruction).startswith(_CONTROL):
              found.append(Event(event.name, str(instruction), event.duration_ns * 1e-9))
  return found


def traced(run: Callable[[], object]) -> list[Event]:
  """Runs `run` under the profiler."""
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      jax.block_until_ready(run())
    return read(folder)


def paths_of_instructions(compiled_text: str) -> dict[str, str]:
  """The source path (`op_name`) of each instruction of a compiled program, by its name.

  Kernels are named after instructions with underscores in place of points and hyphens; both forms
  are keys.
  """
  pattern = re.compile(r"%?([\w.\-]+) = .*?metadata=\{[^}]*op_name=\"([^\"]*)\"")
  found = {}
  for line in compiled_text.splitlines():
    if match := pattern.search(line):
      found[match[1]] = found[re.sub(r"[.\-]", "_", match[1])] = match[2]
  return found


def path_of(event: Event, paths: dict[str, str]) -> str:
  """Source path of an event, by `paths_of_instructions`; "" if unknown."""
  # Inside a CUDA graph the instruction is the graph; the kernel bears the instruction's name.
  return paths.get(event.instruction) or paths.get(event.kernel, "")


def part_of(kernel: str, path: str) -> str:
  """Which part of a training step a kernel belongs to."""
  patterns = {
    "optimizer": "optimizer",
    "loss and head": "next_token_loss",
    "op": rf"\b({'|'.join(dispatch.names())})\b",  # the outermost, which is first in the path
    "channel mixer": "channel_mixer",
    "mixer (rest)": "mixer",
  }
  for part, pattern in patterns.items():  # the first that is found
    if found := re.search(pattern, path):
      return found[1].replace("_", " ") if part == "op" else part
  if re.match(r"nvjet|void cutlass|gemm|cublas|sm\d+_xmma", kernel):
    return "matrix products without a path"
  return "copies" if re.match(r"(?i)memcpy", kernel) else "other"


def summary(events: Iterable[Event], compiled_text: str, steps: int) -> list[str]:
  """Lines with the milliseconds per step and the share of each part, largest first."""
  paths = paths_of_instructions(compiled_text)
  parts: collections.Counter[str] = collections.Counter()
  for event in events:
    parts[part_of(event.kernel, path_of(event, paths))] += event.seconds
  total = sum(parts.values())
  return [
    f"{1e3 * seconds / steps:10.3f} ms  {seconds / total:6.1%}  {part}"
    for part, seconds in parts.most_common()
  ]
