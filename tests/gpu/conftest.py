"""Tests in this folder need a Hopper GPU to themselves: they fill its memory with NaN."""

import jax
import pytest


@pytest.fixture(autouse=True)
def hopper():
  device = jax.devices()[0]
  capability = str(getattr(device, "compute_capability", "none"))
  if device.platform != "gpu" or not capability.startswith("9."):
    kind = f"{device.platform}, compute capability {capability}"
    pytest.skip(f"needs a Hopper GPU, by `make test-gpu` (the default device is a {kind})")
