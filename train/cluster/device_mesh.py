"""The device mesh of a run, with four axes or five, and the sharding of a batch.

`data` replicates the parameters and shards the rows of a batch; `fsdp` shards both; `sequence`
replicates the parameters and shards time; `tensor` replicates the batch and shards heads and
channels. `expert`, which only meshes with more than one shard of it have, shards the rows of a
batch and the experts of a layer.
"""

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lnssm_jax.models import experts
from lnssm_jax.models.options import channel_options
from train import config
from train.cluster import distributed

AXES = ("data", "fsdp", "sequence", "tensor")  # neighbors along the last axis communicate most
ROWS = ("data", "fsdp", experts.AXIS)  # axes that shard the rows of a batch


def make_mesh(cfg: config.Train) -> Mesh:
  """Builds the mesh of `cfg.mesh` over the first devices of `jax.devices()`.

  Raises:
    ValueError: more devices requested than available, or a batch or experts that cannot be sharded
      evenly.
  """
  devices = jax.devices()
  axes = AXES if cfg.mesh.expert == 1 else (*AXES, experts.AXIS)
  sizes = [getattr(cfg.mesh, axis) for axis in axes]
  if -1 in sizes:
    fixed = math.prod(s for s in sizes if s != -1)
    sizes[sizes.index(-1)] = max(1, len(devices) // fixed)
  count, time_shards, tensor = math.prod(sizes), *sizes[2:4]
  label = ", ".join(f"mesh.{axis}={size}" for axis, size in zip(axes, sizes, strict=True))
  if experts.AXIS in axes:
    moe, shards = channel_options(cfg.model).get("moe"), sizes[-1]
    found = 0 if moe is None else moe.get("num_experts", experts.NUM_EXPERTS)
    if found < 1 or found % shards or tensor > 1:
      raise ValueError(
        f"mesh.expert={shards} shards the experts of model.channel_mixer='moe', of which there are"
        f" {found}, evenly, and without mesh.tensor; use another number, or mesh.expert=1."
      )
  if count > len(devices):
    raise ValueError(
      f"{label} need {count} devices, but jax finds {len(devices)} ({devices[0].device_kind}); "
      "lower one of them, or use mesh.data=-1 for all that remain. For a dry run set"
      f" XLA_FLAGS=--xla_force_host_platform_device_count={count} JAX_PLATFORMS=cpu."
    )
  if distributed.count() > 1 and count < len(devices):
    raise ValueError(
      f"{label} use {count} of {len(devices)} devices, but a run in several processes must use all "
      "of them; use mesh.data=-1, or start fewer processes."
    )
  rows, row_shards = cfg.global_batch // cfg.accumulate, count // (time_shards * tensor)
  if rows % row_shards:
    raise ValueError(
      f"a microbatch of {rows} sequences (global_batch={cfg.global_batch} / "
      f"accumulate={cfg.accumulate}) cannot be sharded over the {row_shards} devices of {label} "
      f"that split its rows; use a multiple of {row_shards}, or fewer devices with "
      "--set mesh.data=1."
    )
  lengths = {
    "seq_len": cfg.seq_len,
    "data.document_length": cfg.data.document_length or cfg.seq_len,
  }
  for name, length in lengths.items():
    if length % time_shards:
      raise ValueError(
        f"sequences of {name}={length} cannot be split into mesh.sequence={time_shards} equal "
        f"shards; use {name}={length // time_shards * time_shards or time_shards}, or another "
        "number of shards."
      )
  # Auto: the compiler chooses the shardings that are not given. jax.make_mesh defaults to Explicit.
  return Mesh(
    np.array(devices[:count]).reshape(sizes), axes, axis_types=(AxisType.Auto,) * len(axes)
  )


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Sharding of the arrays [B, T] of a batch."""
  rows = tuple(axis for axis in ROWS if axis in mesh.axis_names)
  return NamedSharding(mesh, PartitionSpec(rows, "sequence"))


def mapped_axes(mesh: Mesh) -> tuple[str, ...]:
  """Mesh axes over which the loss runs inside `jax.shard_map`.

  All of them, because the compiler (GSPMD) cannot partition GPU kernels; also on a mesh of one
  device if there are more devices, because kernels are only chosen where nothing can be
  partitioned. With tensor parallelism, only "sequence" (if larger than 1): the compiler partitions
  heads and channels, and each scan wraps its kernel in its own `shard_map`
  (`lnssm_jax.ops.core.spmd`).
  """
  if jax.device_count() == 1:
    return ()
  if mesh.shape["tensor"] == 1:
    return mesh.axis_names
  return ("sequence",) if mesh.shape["sequence"] > 1 else ()


def replicated(mesh: Mesh) -> NamedSharding:
  """Sharding of an array that every device holds whole."""
  return NamedSharding(mesh, PartitionSpec())
