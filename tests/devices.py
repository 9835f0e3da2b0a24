"""Tests on several devices of the CPU: their number is fixed when jax starts, so in a process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def flags(devices: int) -> dict[str, str]:
  """Environment variables for a process with `devices` devices, compiled as the tests compile."""
  given = os.environ.get("XLA_FLAGS", "")
  count = f"--xla_force_host_platform_device_count={devices}"
  return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{given} {count}".strip()}


def result_of(*arguments: str, devices: int) -> Any:
  """The last line that `python *arguments` prints, read as JSON."""
  done = subprocess.run(
    [sys.executable, *arguments],
    cwd=Path(__file__).parents[1],
    env=os.environ | flags(devices),
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])
