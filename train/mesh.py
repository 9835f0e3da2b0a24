"""The devices of a run as a mesh of four axes, and where a batch lies on it.

`data` copies the parameters and divides the rows of a batch; `fsdp` divides both; `sequence` copies
the parameters and divides every row, that is, time; `tensor` copies the batch and divides heads and
channels.
"""

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from train import config, distributed

AXES = ("data", "fsdp", "sequence", "tensor")  # neighbours along the last talk most
ROWS = ("data", "fsdp")  # those that divide the rows of a batch
BATCH = PartitionSpec(ROWS, "sequence")  # of arrays [B, T]


def make_mesh(cfg: config.Train) -> Mesh:
  """The mesh of `cfg.mesh` over the first devices that jax finds.

  Raises:
    ValueError: more devices asked for than there are, or a batch that they cannot share equally.
  """
  devices = jax.devices()
  sizes = [getattr(cfg.mesh, axis) for axis in AXES]
  if -1 in sizes:
    fixed = math.prod(s for s in sizes if s != -1)
    sizes[sizes.index(-1)] = max(1, len(devices) // fixed)
  count, parts, tensor = math.prod(sizes), *sizes[2:]
  label = f"mesh.data={sizes[0]}, mesh.fsdp={sizes[1]}, mesh.sequence={parts}, mesh.tensor={tensor}"
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
  rows, shares = cfg.global_batch // cfg.accumulate, count // (parts * tensor)
  if rows % shares:
    raise ValueError(
      f"a microbatch of {rows} sequences (global_batch={cfg.global_batch} / "
      f"accumulate={cfg.accumulate}) cannot be divided over the {shares} devices of {label} that "
      f"share its rows; make it a multiple of {shares}, or use fewer with --set mesh.data=1."
    )
  if cfg.seq_len % parts:
    raise ValueError(
      f"sequences of seq_len={cfg.seq_len} cannot be divided into mesh.sequence={parts} equal "
      f"parts; use seq_len={cfg.seq_len // parts * parts or parts}, or another number of parts."
    )
  # Auto: the compiler places what the specs leave open. jax.make_mesh would default to Explicit.
  return Mesh(
    np.array(devices[:count]).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES)
  )


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Where each array [B, T] of a batch lies."""
  return NamedSharding(mesh, BATCH)


def mapped_axes(mesh: Mesh) -> tuple[str, ...]:
  """The axes over which the loss is mapped device by device (`jax.shard_map`).

  All of them, so that GPU kernels run, which the compiler cannot divide. So also on a mesh of one
  device where there are more: what is not mapped could be divided, and takes no kernel. Where
  "tensor" divides anything, only "sequence", if it does: the compiler divides heads and channels,
  and the rest with them. Scans are then mapped one by one (`lnssm_jax.ops.per_device`).
  """
  if jax.device_count() == 1:
    return ()
  if mesh.shape["tensor"] == 1:
    return AXES
  return ("sequence",) if mesh.shape["sequence"] > 1 else ()


def replicated(mesh: Mesh) -> NamedSharding:
  """Everything on every device."""
  return NamedSharding(mesh, PartitionSpec())
