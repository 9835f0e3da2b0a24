"""Where a device's time goes: the kernels of a profiler trace, summed by part of the model."""

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


def trace(run: Callable[[], object]) -> list[tuple[str, str, float]]:
  """Runs `run` under the profiler: (kernel, instruction of the compiled program, seconds) each."""
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      jax.block_until_ready(run())
    (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    planes = ProfileData.from_file(path).planes
    return [
      (event.name, str(dict(event.stats).get("hlo_op", event.name)), event.duration_ns * 1e-9)
      for plane in planes
      if plane.name.startswith("/device:GPU")
      for line in plane.lines
      if line.name.startswith("Stream")
      for event in line.events
    ]


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


def part_of(kernel: str, path: str) -> str:
  """Which part of a training step a kernel belongs to."""
  for part, pattern in PARTS:
    if re.search(pattern, path):
      return part
  if re.match(r"nvjet|void cutlass|gemm|cublas|sm\d+_xmma", kernel):
    return "matrix products without a path"
  return "copies" if re.match(r"(?i)memcpy", kernel) else "other"
