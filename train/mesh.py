"""The devices of a run as a mesh of two axes, and where a batch lies on it.

`data` copies the parameters and divides the batch; `fsdp` divides both.
"""

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from train import config, distributed

AXES = ("data", "fsdp")
BATCH = PartitionSpec(AXES)  # rows of a batch are divided over all devices


def make_mesh(cfg: config.Train) -> Mesh:
  """The mesh of `cfg.mesh` over the first devices that jax finds.

  Raises:
    ValueError: more devices asked for than there are, or a batch that they cannot share equally.
  """
  devices = jax.devices()
  sizes = [cfg.mesh.data, cfg.mesh.fsdp]
  if -1 in sizes:
    fixed = math.prod(s for s in sizes if s != -1)
    sizes[sizes.index(-1)] = max(1, len(devices) // fixed)
  count = math.prod(sizes)
  label = f"mesh.data={sizes[0]} and mesh.fsdp={sizes[1]}"
  if count > len(devices):
    raise ValueError(
      f"{label} need {count} devices, but jax finds {len(devices)} ({devices[0].device_kind}); "
      "lower one of them, or use mesh.data=-1 for all that remain."
    )
  if distributed.count() > 1 and count < len(devices):
    raise ValueError(
      f"{label} use {count} of {len(devices)} devices, but a run in several processes must use all "
      "of them; use mesh.data=-1, or start fewer processes."
    )
  rows = cfg.global_batch // cfg.accumulate
  if rows % count:
    raise ValueError(
      f"a microbatch of {rows} sequences (global_batch={cfg.global_batch} / "
      f"accumulate={cfg.accumulate}) cannot be divided over the {count} devices of {label}; "
      f"make it a multiple of {count}, or use fewer devices with --set mesh.data=1."
    )
  # Auto: the compiler places what the specs leave open. jax.make_mesh would default to Explicit.
  return Mesh(np.array(devices[:count]).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * 2)


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Where each array [B, T] of a batch lies."""
  return NamedSharding(mesh, BATCH)


def replicated(mesh: Mesh) -> NamedSharding:
  """Everything on every device."""
  return NamedSharding(mesh, PartitionSpec())
