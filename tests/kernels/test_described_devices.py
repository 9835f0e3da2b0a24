"""Kernels for GPUs since Ampere compile for GPUs that are not there: XLA's compiler needs none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels import described

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(bool(described.missing()), reason=f"needs {described.missing()}")
@pytest.mark.parametrize("name", described.GPUS)
def test_kernels_since_ampere_compile_for_a_described_gpu(name):
  """Which finds instructions that the GPU lacks, and SMEM beyond its own."""
  environment = os.environ | {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
  command = [sys.executable, "-m", "tests.kernels.described", name]
  done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
  assert done.returncode == 0, done.stdout + done.stderr
  assert len(done.stdout.splitlines()) == 36
