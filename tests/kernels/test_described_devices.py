"""Kernels for GPUs since Ampere compile for GPUs that are not there: XLA's compiler needs none."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import described

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(bool(described.missing()), reason=f"needs {described.missing()}")
@pytest.mark.parametrize("name", [name for name in described.GPUS if name != "H100"])
def test_kernels_since_ampere_compile_for_a_described_gpu(name):
  """Which finds instructions that the GPU lacks, and SMEM beyond its own."""
  command = [sys.executable, "-m", "tests.kernels.described", name]
  done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
  assert done.returncode == 0, done.stdout + done.stderr
  assert len(done.stdout.splitlines()) == 39
