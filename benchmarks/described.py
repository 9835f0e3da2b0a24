"""GPUs that are described and not there, for which XLA's compiler compiles all the same.

The process needs JAX's plugin for CUDA and no GPU. A kernel that the GPU cannot run may end the
process in LLVM.
"""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

import jax
import jax.experimental.mosaic.gpu.utils as mosaic_gpu
from jax.experimental import topologies

from pallas_kernels.core import device


class Gpu(NamedTuple):
  """Facts of a GPU, from its vendor's tables."""

  kind: str
  capability: tuple[int, int]
  sm_count: int
  threads_per_sm: int
  smem_per_sm: int  # KiB
  smem_per_cta: int  # KiB
  memory: int  # GiB
  bandwidth: int  # GB/s
  l2: int  # MiB


GPUS = {
  "A100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 2048, 164, 163, 80, 2039, 40),
  "RTX 4090": Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 1536, 100, 99, 24, 1008, 72),
  "H100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 2048, 228, 227, 80, 3352, 50),
  "B200": Gpu("NVIDIA B200", (10, 0), 148, 2048, 228, 227, 180, 8000, 126),
  "RTX 5090": Gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, 1536, 128, 99, 32, 1792, 96),
}


def missing() -> str | None:
  """Why nothing can be compiled here, or None."""
  found = importlib.util.find_spec("jax_plugins") and importlib.util.find_spec(
    "jax_plugins.xla_cuda13"
  )
  return None if found else "pip install 'jax[cuda13]'"


def described(gpu: Gpu) -> jax.Device:
  """A device on which nothing runs."""
  os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # by the plugin, of a driver
  major, minor = gpu.capability
  extension = "NONE" if major < 9 else "ACCELERATED_FEATURES"
  fields = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 48 << 10,
    "shared_memory_per_core": gpu.smem_per_sm << 10,
    "shared_memory_per_block_optin": gpu.smem_per_cta << 10,
    "threads_per_core_limit": gpu.threads_per_sm,
    "core_count": gpu.sm_count,
    "fpus_per_core": 128,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "memory_bandwidth": gpu.bandwidth * 10**9,
    "l2_cache_size": gpu.l2 << 20,
    "clock_rate_ghz": 1.5,
    "device_memory_size": gpu.memory << 30,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
  }
  info = " ".join(f"{name}: {value}" for name, value in fields.items())
  capability = f"major: {major} minor: {minor} feature_extension: {extension}"
  config = (
    f"gpu_device_info {{ {info} cuda_compute_capability {{ {capability} }} }} "
    'platform_name: "CUDA" runtime_version { major: 13 } '
    "dnn_version_info { major: 9 minor: 8 patch: 0 } "
    f'device_description_str: "{gpu.kind}"'
  )
  # One process with one device.
  options = {"target_config": config, "topology": "1x1x1"}
  return topologies.get_topology_desc("", platform="cuda", **options).devices[0]


@contextlib.contextmanager
def default(gpu: Gpu, architecture: str | None = None) -> Iterator[jax.Device]:
  """As if `gpu` were the only device, with the kernels of an architecture, or its own."""
  there = described(gpu)
  patches = [
    mock.patch.object(mosaic_gpu, "_infer_arch", lambda: gpu.capability),
    mock.patch.object(device, "default_device", lambda: there),
    mock.patch.object(jax, "devices", lambda *_: [there]),
    mock.patch.object(jax, "device_count", lambda *_: 1),
    mock.patch.object(jax, "default_backend", lambda: "gpu"),
  ]
  if architecture is not None:
    patches.append(mock.patch.object(device, "architecture_of", lambda _: architecture))
  with contextlib.ExitStack() as stack:
    for patch in patches:
      stack.enter_context(patch)
    yield there
