"""Predicted time of a training step on a mesh of any size, from the speed of one device.

    scaling = Scaling(cfg, 49_219)  # tokens/s of one device, measured
    scaling.step_seconds({"data": 8, "fsdp": 8}), scaling.efficiency({"tensor": 2})

To the time of a device's own tokens are added that of all collectives, of which nothing overlaps
(docs/results/training.md), and that of the second pass over a shard of a sequence. Adam runs on a
device's shards only. A collective of n devices takes

    10 us + steps * (1.9 us, or 4 us between hosts) + steps / n * bytes / rate

with n - 1 steps to gather or scatter and 2 (n - 1) to sum, if no tree is faster. Collectives follow
from the parameters and their sharding (docs/sharding.md): per microbatch the gradients of each
layer are summed, its shards are gathered twice and scattered once; sums of activations, states of
shards and tokens of experts are sent. Memory is not predicted: `--dry-run` compiles for that.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from lnssm_jax import sharding
from lnssm_jax.models import settings
from train import config
from train.cluster.device_mesh import AXES

Sizes = Mapping[str, int]  # devices by mesh axis

ORDER = (*AXES, "expert")  # of a mesh's axes; neighbors are along the last
PER_HOST = 8
COUNTS = (8, 64, 256, 1024)  # devices of `Scaling.table`

# NCCL's own model of rings and, for sums, of trees (its src/graph/tuning.cc, protocol LL128):
# seconds, and the share of a link's rate that is reached (20.6 of 25 GB/s of an NVLink).
CALL, HOP, HOP_OF_HOSTS = 10e-6, 1.9e-6, 4e-6
TREE_CALL, TREE_HOP, TREE_HOP_OF_HOSTS = 4.4e-6, 1.2e-6, 8.5e-6
REACHED = 0.82
COMBINED = 30 * 2**20  # bytes of gradients that XLA sums at once, by default
# Share of the memory's rate that norms, activations and Adam reach (docs/performance.md).
MEMORY_REACHED = 0.8
ADAM = 28  # bytes of a parameter that the optimizer reads and writes

# The only fitted numbers, to the runs on two H100s in docs/results/training.md: bytes per second of
# what a device adds up, and the arrays [tokens, D] per layer of the second pass over a shard of a
# sequence, which finds the state that it leaves.
ADDED = 185e9
SECOND_PASS = 46


class Gpu(NamedTuple):
  """Bytes per second by the vendor's data sheet: of the memory, and in one direction by NVLink."""

  memory: float
  nvlink: float


GPUS = {
  "NVIDIA A100": Gpu(2.039e12, 300e9),
  "NVIDIA H100": Gpu(3.352e12, 450e9),
  "NVIDIA H200": Gpu(4.8e12, 450e9),
}


class Interconnect(NamedTuple):
  """Bytes per second in one direction: of a device in its host, and of a host of 8 devices."""

  local: float | None  # None: NVLink
  host: float
  description: str


INTERCONNECTS = {
  "nvlink": Interconnect(None, 400e9, "NVLink in hosts of 8, 400 Gb/s per GPU between them"),
  "nvlink-ethernet": Interconnect(None, 12.5e9, "NVLink in hosts of 8, 100 Gb/s between them"),
  "pcie": Interconnect(64e9, 50e9, "PCIe 5.0 in hosts of 8, 400 Gb/s between them"),
}


class Collective(NamedTuple):
  """Arrays of `size` bytes, when whole, sent along `axes` `count` times per microbatch."""

  kind: Literal["gather", "scatter", "sum"]  # "scatter" adds up what it scatters
  axes: tuple[str, ...]
  count: float
  size: float


def gpu_of(kind: str) -> str:
  """The GPU of `GPUS` that a device's name begins with, or an H100."""
  return next((name for name in GPUS if kind.startswith(name)), "NVIDIA H100")


class _Parameter(NamedTuple):
  path: tuple[str, ...]
  shape: tuple[int, ...]
  itemsize: int
  axes: frozenset[str]  # that shard it

  @property
  def in_layer(self) -> bool:
    return self.path[0] == "blocks"

  @property
  def layers(self) -> int:
    return self.shape[0] if self.in_layer else 1


class Scaling:
  """The step of a run on any mesh; an axis that `sizes` does not name has one device.

  Args:
    tokens_per_second: of one device, with this model and as many tokens per microbatch.
    gpu: of `GPUS`.
    interconnect: of `INTERCONNECTS`.

  Raises:
    ValueError: a speed, a mesh or an interconnect that cannot be.
  """

  def __init__(
    self,
    cfg: config.Train,
    tokens_per_second: float,
    gpu: str = "NVIDIA H100",
    interconnect: str = "nvlink",
  ):
    if not 0 < tokens_per_second < math.inf:
      raise ValueError(
        f"tokens_per_second={tokens_per_second} must be positive: the speed of one device."
      )
    for name, value, known in (("gpu", gpu, GPUS), ("interconnect", interconnect, INTERCONNECTS)):
      if value not in known:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(known)}.")
    self.cfg, self.tokens_per_second, self._gpu = cfg, tokens_per_second, GPUS[gpu]
    self._links = INTERCONNECTS[interconnect]
    graph, params = settings.abstract_model(cfg.model)
    specs = sharding.param_specs(params, ORDER)
    flat = jax.tree_util.tree_leaves_with_path(params)
    of_specs = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    self._params = [
      _Parameter(tuple(entry.key for entry in path), x.shape, x.dtype.itemsize, _axes_of(spec))
      for (path, x), spec in zip(flat, of_specs, strict=True)
    ]
    state = jax.eval_shape(lambda: nnx.merge(graph, params).init_state(1))
    self._state_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))

  def step_seconds(self, sizes: Sizes, tokens: float | None = None) -> float:
    """Predicted seconds per step.

    Args:
      tokens: of a device per step; None: those of the run's global batch.
    """
    mesh = self._mesh(sizes)
    if tokens is None:
      tokens = self.cfg.global_batch * self.cfg.seq_len / math.prod(mesh.values())
    per_microbatch = tokens / self.cfg.accumulate
    sent = sum(each.count * self._seconds(each, mesh) for each in self.collectives(sizes, tokens))
    memory = MEMORY_REACHED * self._gpu.memory
    passes = SECOND_PASS * self.cfg.model.num_layers if mesh["sequence"] > 1 else 0
    repeated = passes * self._activations(per_microbatch) / memory
    elsewhere = sum(math.prod(x.shape) * (1 - 1 / _shards(x, mesh)) for x in self._params)
    once = max(0.0, tokens / self.tokens_per_second - ADAM * elsewhere / memory)
    return once + self.cfg.accumulate * (sent + repeated)

  def efficiency(self, sizes: Sizes, tokens: float | None = None) -> float:
    """Tokens/s over those of as many single devices."""
    if tokens is None:
      devices = math.prod(self._mesh(sizes).values())
      tokens = self.cfg.global_batch * self.cfg.seq_len / devices
    return tokens / self.tokens_per_second / self.step_seconds(sizes, tokens)

  def table(self, tokens: float) -> dict[str, list[float]]:
    """Efficiency on each of `COUNTS` devices with `tokens` each, of meshes that suit the model."""
    inner = [{}, {"fsdp": 8}, {"sequence": 8}]
    has_experts = any("experts" in x.path for x in self._params)
    inner += [{"expert": 8}] if has_experts else [{"tensor": 2}, {"tensor": 8}]
    meshes = {" x ".join(["data", *(f"{axis} {n}" for axis, n in x.items())]): x for x in inner}
    rows = {"fsdp": [self.efficiency({"fsdp": count}, tokens) for count in COUNTS]}
    for name, mesh in meshes.items():
      rest = [mesh | {"data": count // math.prod(mesh.values())} for count in COUNTS]
      rows[name] = [self.efficiency(sizes, tokens) for sizes in rest]
    return rows

  def collectives(self, sizes: Sizes, tokens: float) -> Iterator[Collective]:
    """Those of a microbatch, along axes of one device too; `tokens` as of `step_seconds`."""
    mesh, model, tokens = self._mesh(sizes), self.cfg.model, tokens / self.cfg.accumulate
    gradients: dict[tuple[str, ...], float] = {}
    for x in self._params:
      axes = tuple(axis for axis in ("data", "fsdp", "sequence", "expert") if axis not in x.axes)
      size = self._bytes_in_use(x, mesh)
      if "fsdp" in x.axes and mesh["fsdp"] > 1:
        yield Collective("gather", ("fsdp",), x.layers * (2 if x.in_layer else 1), size)
        yield Collective("scatter", ("fsdp",), x.layers, size)
        size /= mesh["fsdp"]
      elif x.path == ("embedding",) and model.tie_embeddings:
        size *= 2  # its gradient as a head is summed by itself
      gradients[axes] = gradients.get(axes, 0) + x.layers * size
    for axes, size in gradients.items():
      count = math.ceil(size / COMBINED)
      yield Collective("sum", axes, count, size / count)
    sums, experts = self._sums_and_experts()
    activations = self._activations(tokens)
    yield Collective("sum", ("tensor",), sums, mesh["tensor"] * activations)
    again = model.remat != "none"  # the backward pass computes a layer's activations again
    rows = tokens * mesh["sequence"] * mesh["tensor"] / self.cfg.seq_len  # of a device
    states = mesh["sequence"] * rows * self._state_bytes / mesh["tensor"] / model.num_layers
    yield Collective("gather", ("sequence",), model.num_layers * (1 + again), states)
    yield Collective("scatter", ("sequence",), model.num_layers, states)
    # The last tokens, to a neighbor.
    yield Collective("gather", ("sequence",), model.num_layers * (2 + again), 0)
    # Inputs of experts are gathered and float32 outputs scattered; backward cotangents of outputs,
    # which XLA gathers in the dtype of activations, and of inputs.
    inputs, outputs = mesh["expert"] * activations, mesh["expert"] * 4 * tokens * model.dim
    for kind, forward, backward in (("gather", inputs, inputs), ("scatter", outputs, inputs)):
      yield Collective(kind, ("expert",), experts * (1 + again), forward)
      yield Collective(kind, ("expert",), experts, backward)

  def _bytes_in_use(self, x: _Parameter, mesh: Sizes) -> float:
    """Of one layer's array when it is gathered: products have their own dtype."""
    itemsize = self._itemsize if x.in_layer and len(x.shape) > 2 else x.itemsize
    return math.prod(x.shape) / x.layers * itemsize / _shards(x, mesh, ("tensor", "expert"))

  def _sums_and_experts(self) -> tuple[int, int]:
    """(Activations that `tensor` sums in all layers, layers with experts).

    A mixer's or channel mixer's outputs are summed, and the gradients of its inputs, of each
    token-shifted one by itself.
    """
    streams: dict[tuple[str, ...], int] = {}
    layers: dict[tuple[str, ...], int] = {}
    experts = 0
    for x in self._params:
      part = next((i for i, name in enumerate(x.path) if name in ("mixer", "channel_mixer")), None)
      if x.in_layer and part is not None:
        owner, own = x.path[: part + 1], x.path[part + 1 :]
        layers[owner] = x.layers
        streams[owner] = streams.get(owner, 0) + own[0].startswith("mu_")
        experts += x.layers * (own[:2] == ("experts", "down"))
    recomputed = self.cfg.model.remat == "full"
    sums = sum(n * (1 + recomputed + max(1, streams[owner])) for owner, n in layers.items())
    return sums, experts

  def _seconds(self, sent: Collective, mesh: Sizes) -> float:
    """Of one of the collectives."""
    devices = math.prod(mesh[axis] for axis in sent.axes)
    if devices == 1:
      return 0.0
    numbers = np.arange(math.prod(mesh.values())).reshape([mesh[axis] for axis in ORDER])
    group = numbers[tuple(slice(None) if axis in sent.axes else 0 for axis in ORDER)]
    together = int((group < PER_HOST).sum())  # of the group, in one host
    hosts = -(-devices // together)
    rate = REACHED * (self._links.local or self._gpu.nvlink)
    if hosts > 1:
      rate = min(rate, REACHED * self._links.host / PER_HOST * together)
    if sent.kind != "gather":
      rate = min(rate, ADDED)
    rounds = 2 if sent.kind == "sum" else 1
    steps, between = rounds * (devices - 1), rounds * (hosts - 1)
    latency = CALL + (steps - between) * HOP + between * HOP_OF_HOSTS
    if sent.kind == "sum":
      tree = 2 * ((together - 1) * TREE_HOP + math.log2(hosts) * TREE_HOP_OF_HOSTS)
      latency = min(latency, TREE_CALL + tree)
    return latency + steps / devices * sent.size / rate

  @property
  def _itemsize(self) -> int:
    return np.dtype(self.cfg.model.dtype).itemsize

  def _activations(self, tokens: float) -> float:
    return tokens * self.cfg.model.dim * self._itemsize

  def _mesh(self, sizes: Sizes) -> dict[str, int]:
    if any(axis not in ORDER or size < 1 for axis, size in sizes.items()):
      raise ValueError(
        f"sizes={dict(sizes)} must have axes of {', '.join(ORDER)}, of at least one device each."
      )
    return dict.fromkeys(ORDER, 1) | dict(sizes)


def _axes_of(spec: PartitionSpec) -> frozenset[str]:
  entries = [(x,) if isinstance(x, str) else x or () for x in spec]
  return frozenset(axis for entry in entries for axis in entry)


def _shards(x: _Parameter, mesh: Sizes, axes: tuple[str, ...] = ORDER) -> int:
  return math.prod(mesh[axis] for axis in axes if axis in x.axes)
