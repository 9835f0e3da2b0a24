"""Where a device's time goes: the kernels of a profiler trace, summed by part of the model."""

import collections
import glob
import re
import tempfile
from collections.abc import Callable

import jax
from jax.profiler import ProfileData

# The first pattern found in an operation's path in the source names its part of the step.
PARTS = (
  ("optimizer", r"optimizer"),
  ("loss and head", r"next_token_loss"),
  ("linear attention", r"linear_attention"),
  ("channel mixer", r"channel_mixer"),
  ("mixer (rest)", r"mixer"),
)


def trace(run: Callable[[], object]) -> tuple[float, collections.Counter, collections.Counter]:
  """Runs `run` under the profiler: (busy seconds of the device, seconds by kernel, launches)."""
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      jax.block_until_ready(run())
    (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    data = ProfileData.from_file(path)
    seconds, launches = collections.Counter(), collections.Counter()
    for plane in data.planes:
      if not plane.name.startswith("/device:GPU"):
        continue
      for line in plane.lines:
        if not line.name.startswith("Stream"):
          continue
        for event in line.events:
          seconds[event.name] += event.duration_ns * 1e-9
          launches[event.name] += 1
  return sum(seconds.values()), seconds, launches


def paths_of_kernels(compiled_text: str) -> dict[str, str]:
  """The source path (`op_name`) of each instruction of a compiled program, by instruction name."""
  pattern = re.compile(r"%?([\w.\-]+) = .*?metadata=\{[^}]*op_name=\"([^\"]*)\"")
  found = {}
  for line in compiled_text.splitlines():
    if match := pattern.search(line):
      found[match[1].replace(".", "_").replace("-", "_")] = match[2]
  return found


def part_of(path: str) -> str:
  """Which part of a training step an operation belongs to."""
  for part, pattern in PARTS:
    if re.search(pattern, path):
      return part
  return "other"
