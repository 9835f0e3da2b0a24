"""The devices of these benchmarks' processes: CPUs, or the GPUs of this machine."""

import argparse
import os

CPU, GPU = "cpu", "gpu"
# The same program gives the same bits in every process; atomic additions would not.
_FLAGS = "--xla_gpu_deterministic_ops=true"


def add_option(parser: argparse.ArgumentParser) -> None:
  """Adds `--platform`."""
  parser.add_argument(
    "--platform", choices=(CPU, GPU), default=CPU, help="gpu: one or more for each process"
  )


def use(platform: str) -> None:
  """Chooses the devices of processes that are started later; this one must have no backend."""
  import jax

  names = "cuda,cpu" if platform == GPU else "cpu"
  os.environ["JAX_PLATFORMS"] = names
  jax.config.update("jax_platforms", names)
  if platform == GPU:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # processes may share a GPU


def is_gpu() -> bool:
  """Whether `use` has chosen GPUs."""
  return os.environ.get("JAX_PLATFORMS", "").startswith("cuda")


def of_process(index: int, devices: int) -> dict[str, str]:
  """Environment of process `index`, of which each has so many devices; empty on CPUs."""
  if not is_gpu():
    return {}
  own = range(index * devices, (index + 1) * devices)
  return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, own))}
