"""Training steps on several device meshes. Run as a program: the number of devices is fixed when
jax starts. Prints JSON.

    python -m tests.train.arrangements CONFIG trained 1 2x2 1x2x2 "1x1x1x2 kernels"
    python -m tests.train.arrangements CONFIG kernels 2x2
    python -m tests.train.arrangements CONFIG traffic 1x1x2

Sizes are those of data x fsdp x sequence x tensor; what is not said is 1. With "kernels", scans are
run in shard_map as kernels are, with XLA implementations in their place, as on a CPU.
"""

import collections
import contextlib
import dataclasses
import importlib
import json
import math
import re
import sys
from unittest import mock

import jax
import numpy as np

from lnssm_jax.ops.core import dispatch
from train.cluster import device_mesh
from train.config import Mesh, load_config
from train.step.model import model_graph
from train.step.optimizer import make_optimizer
from train.step.state import abstract_state, init_state
from train.step.train_step import make_train_step

COLLECTIVES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
WITH_KERNELS = (
  "causal_conv1d", "delta_rule", "diagonal_scan", "linear_attention", "longhorn_scan",
  "selective_scan", "wkv4",
)  # fmt: skip
STEPS = 3  # each step amplifies the rounding errors of those before


def arranged(cfg, sizes: str):
  """Config with a mesh such as "2x2", and the mesh."""
  axes = dict(zip((*device_mesh.AXES, "expert"), map(int, sizes.split("x")), strict=False))
  cfg = dataclasses.replace(cfg, mesh=Mesh(**{"data": 1} | axes))
  return cfg, device_mesh.make_mesh(cfg)


def batches(cfg):
  """Random tokens, some with weight 0, and documents that start anywhere."""
  rng = np.random.default_rng(0)
  shape = (STEPS, cfg.global_batch, cfg.seq_len + 1)
  tokens = rng.integers(0, cfg.model.vocab_size, shape).astype("int32")
  segments = np.cumsum(rng.random(tokens[..., 1:].shape) < 0.1, axis=-1).astype("int32")
  weights = (rng.random(segments.shape) < 0.8).astype("float32")
  references = rng.uniform(4, 6, weights.shape).astype("float32")
  for t, s, w, r in zip(tokens, segments, weights, references, strict=True):
    batch = {"tokens": t[:, :-1], "targets": t[:, 1:], "segment_ids": s, "weights": w}
    yield batch | ({"reference": r * w} if cfg.data.has_pairs else {})


def step_of(cfg, mesh):
  tx, _ = make_optimizer(cfg.optimizer, cfg.steps)
  return make_train_step(cfg, model_graph(cfg.model), tx, mesh)


def bits(tree):
  return b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(tree)).hex()


def moments(state):
  """First moment of every parameter: after one step, proportional to the gradient."""
  return state["opt_state"][1].mu


@contextlib.contextmanager
def stand_ins():
  """Runs XLA implementations in place of kernels; yields a list of their argument shapes."""
  seen = []

  def standing_in(form):
    def run(first, *args, **kwargs):
      seen.append((first[0] if isinstance(first, tuple) else first).shape)
      return form(first, *args, **kwargs)

    return run

  with contextlib.ExitStack() as stack:
    stack.enter_context(mock.patch.object(dispatch.device, "unsupported", lambda *_: None))
    for scan in WITH_KERNELS:
      api, pallas = (
        importlib.import_module(f"lnssm_jax.ops.{scan}.{x}") for x in ("api", "pallas")
      )
      forms = api.IMPLEMENTATIONS
      run = standing_in(forms.get("chunked", forms["reference"]).run)
      others = {"unsupported": lambda *_, **__: None, "preferred": lambda *_, **__: True}
      stack.enter_context(mock.patch.multiple(pallas, run=run, **others))
    yield seen


def trained(cfg, sizes: str, alone: dict):
  """Initial state, metrics and gradients of some steps; the fraction stored per device."""
  if sizes.endswith(" kernels"):
    with stand_ins() as seen:
      result = trained(cfg, sizes.removesuffix(" kernels"), alone)
    return result | {"scans": seen}
  cfg, mesh = arranged(cfg, sizes)
  state = init_state(cfg, mesh)
  result = {"start": bits(state)}
  kernel = max(jax.tree.leaves(moments(state)["blocks"]), key=lambda x: x.size)
  result["share"] = kernel.addressable_shards[0].data.size / kernel.size
  rows, compiled = [], None
  for batch in batches(cfg):
    batch = jax.device_put(batch, device_mesh.batch_sharding(mesh))
    compiled = compiled or step_of(cfg, mesh).lower(state, batch).compile()
    state, metrics = compiled(state, batch)  # rejects other shardings than at the start
    rows.append([float(metrics["loss"]), float(metrics["grad_norm"]), float(metrics["param_norm"])])
    if len(rows) == 1:
      gradient = jax.tree.map(np.asarray, moments(state))
      alone.setdefault("gradient", gradient)
      result["gradient_error"] = max(
        float(np.abs(x - y).max() / np.abs(y).max())
        for x, y in zip(*map(jax.tree.leaves, (gradient, alone["gradient"])), strict=True)
        if y.any()
      )
  memory = compiled.memory_analysis()
  result["bytes"] = memory.argument_size_in_bytes + memory.temp_size_in_bytes
  return result | {"rows": rows, "collectives": collectives(compiled.as_text())}


def collectives(text: str) -> list[dict[str, int]]:
  """Number of collectives per computation that has any; of arrays, if one takes several."""
  found, name = collections.defaultdict(collections.Counter), ""
  for line in text.splitlines():
    if heading := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
      name = heading[1]
    if call := re.search(rf"= (.*?) ({COLLECTIVES})(?:-start)?\(", line):
      found[name][call[2]] += call[1].count("]{") or 1
  return list(found.values())


def kernels(cfg, sizes: str, alone: dict):
  """Number of kernels of the step, lowered for CUDA."""
  del alone
  dispatch.device.unsupported = lambda *_: None
  return lowered(cfg, sizes, "cuda").count("custom_call @mosaic_gpu")


def traffic(cfg, sizes: str, alone: dict):
  """Bytes sent per kind of collective in the step, counting loop bodies once."""
  del alone
  found, kind = collections.Counter(), None
  for line in lowered(cfg, sizes, "cpu").splitlines():
    if operation := re.search(rf'"stablehlo\.({COLLECTIVES.replace("-", "_")})"', line):
      kind = operation[1]
    # The types are on the same line, or after the body of the reduction.
    if kind and (types := re.search(r" : \(tensor<([^>]*)>\) -> tensor<", line)):
      *shape, dtype = types[1].split("x")
      found[kind] += math.prod(map(int, shape)) * int(re.sub(r"\D", "", dtype)) // 8
      kind = None
  return found


def lowered(cfg, sizes: str, platform: str) -> str:
  cfg, mesh = arranged(cfg, sizes)
  batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device_mesh.batch_sharding(mesh)),
    next(batches(cfg)),
  )
  traced = step_of(cfg, mesh).trace(abstract_state(cfg, mesh), batch)
  return traced.lower(lowering_platforms=(platform,)).as_text()


if __name__ == "__main__":
  config, what, *arrangements = sys.argv[1:]
  run, alone = {"trained": trained, "kernels": kernels, "traffic": traffic}[what], {}
  print(json.dumps({sizes: run(load_config(config), sizes, alone) for sizes in arrangements}))
