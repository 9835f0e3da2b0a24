"""Meshes of `jax.make_mesh`'s default axis type, Explicit."""

import json
import os
import subprocess
import sys
from pathlib import Path


def test_explicit_mesh_over_the_batch_gives_equal_values_and_gradients():
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2",
  }
  command = [sys.executable, "-m", "tests.models.explicit_mesh"]
  done = subprocess.run(
    command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2]
  )
  assert done.returncode == 0, done.stderr
  result = json.loads(done.stdout.splitlines()[-1])
  assert {name: error for name, error in result["errors"].items() if not error < 1e-5} == {}
  assert set(result["specs"].values()) == {"data"}
  assert "linear_attention: an argument of shape (2, 2, 2, 4) is sharded" in result["message"]
  assert "axis_types=(jax.sharding.AxisType.Auto,) * 1" in result["message"]
