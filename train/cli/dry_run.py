"""`lnssm-train fit --dry-run`: checks a run and prints its memory and FLOPs.

Reads no text, initializes no parameters, and writes only programs, for the first start of the run.
"""

import fnmatch
import math
from typing import Any

import jax
from jax.sharding import Mesh

from lnssm_jax.files import buckets
from lnssm_jax.files.buckets import Bucket
from lnssm_jax.pretrained import hugging_face
from lnssm_jax.pretrained.exports import ExportError, flat
from train import config
from train.cluster import compile_cache, distributed
from train.cluster.device_mesh import make_mesh
from train.data import preflight
from train.logging import run_summary
from train.logging.console import Console, short
from train.step import flops, memory, scaling
from train.step.model import check_length, model_graph
from train.step.optimizer import weight_decay_mask
from train.step.state import abstract_state
from train.trainer import check_memory, compile_step

ASSUMED_MFU = 0.4  # of one device whose speed is not given


def describe(
  cfg: config.Train, tokens_per_second: float | None = None, interconnect: str | None = None
) -> None:
  """Prints devices, parameters, memory per device and FLOPs per step of a run with config `cfg`.

  Of a mesh of several devices, or with one of the other arguments, also what `train.step.scaling`
  predicts.

  Memory is the compiler's plan for the training step: arguments (parameters, optimizer, batch),
  results that do not reuse arguments, and temporaries. It excludes prefetched batches and the copy
  of the state during a save. With several processes, all compile the same program.

  Raises:
    ValueError: the mesh does not match the devices or the batch, the tokenizer the model, the data
      the length of sequences; or the step needs more memory than a device has.
  """
  console = Console(quiet=not distributed.is_first())
  programs = cfg.compile_cache
  if programs == compile_cache.IN_RUN:  # there is none yet
    kept = compile_cache.of_dry_run(config.to_dict(cfg))
    programs = compile_cache.folder(programs, kept) if kept else None
  with compile_cache.at(programs):
    mesh = make_mesh(cfg)
    if buckets.is_bucket(cfg.run_dir):
      console.say(f"bucket      {cfg.run_dir}, {len(Bucket(cfg.run_dir).files())} files")
    run_summary.devices(console, mesh)
    check_length(cfg.model, "seq_len", cfg.seq_len)
    state = abstract_state(cfg, mesh)
    params = state["params"]
    for line in preflight.missing(cfg):
      console.say(f"missing     {line}")
    console.say(f"model       {run_summary.describe(cfg.model, params)}")
    theirs = hugging_face.exportable(config.to_dict(cfg.model)).items()
    others = ", ".join(f"{layout} ({name})" for layout, name in theirs)
    console.say(f"exportable  {f'by --layout {others}' if others else 'in our own layout only'}")
    if cfg.optimizer.lora_rank is not None:
      console.say(_adapter(cfg, params))
    if cfg.optimizer.weight_decay:
      console.say(f"decay       {weight_decay(cfg.optimizer.weight_decay, params)}")
    sizes = (
      math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state)
    )
    console.say(f"state       {memory.amount(sum(sizes))} per device: parameters and optimizer")
    compiled = compile_step(cfg, model_graph(cfg.model), mesh, None, console)
  if (limit := memory.available(mesh)) is not None:
    console.say(f"available   {memory.amount(limit)} on each device")
  check_memory(cfg, mesh, compiled, console)
  tokens = cfg.global_batch * cfg.seq_len
  per_token = flops.model_flops_per_token(cfg.model, cfg.seq_len)
  if mesh.size > 1 or tokens_per_second is not None or interconnect is not None:
    for line in prediction(cfg, mesh, per_token, tokens_per_second, interconnect or "nvlink"):
      console.say(line)
  if per_token is None:
    pattern = [cfg.model.mixer] if isinstance(cfg.model.mixer, str) else cfg.model.mixer
    without = ", ".join(dict.fromkeys(filter(flops.no_formula, pattern)))
    console.say(f"FLOPs       unknown: the class of {without} does not state recurrence_flops")
    return
  model = flops.TRAINING_FACTOR * per_token * tokens
  console.say(
    f"FLOPs       {model:.4g} per step of {short(tokens)} tokens (model FLOPs), "
    f"{model / mesh.size:.4g} per device"
  )


def _adapter(cfg: config.Train, params: Any) -> str:
  """Whether PEFT has matrices for the corrections: `export` would say so after the run only."""
  shapes = {name: x.shape for name, x in flat(params).items()}
  kernels = {
    x: shapes[x] for name in cfg.optimizer.lora_names for x in fnmatch.filter(shapes, name)
  }
  try:
    hugging_face.check_adapter(config.to_dict(cfg.model), kernels)
  except ExportError as error:
    return f"no adapter  by --layout peft: {error}"
  return "adapter     by --layout peft"


def prediction(
  cfg: config.Train,
  mesh: Mesh,
  per_token: int | None,
  tokens_per_second: float | None,
  interconnect: str,
) -> list[str]:
  """The predicted step of a mesh, and a table of efficiencies on up to 1,024 devices.

  Args:
    per_token: model FLOPs of the forward pass, or None.
    tokens_per_second: measured on one device; None: of an assumed utilization.
  """
  gpu = scaling.gpu_of(mesh.devices.flat[0].device_kind)
  source = "given"
  if tokens_per_second is None and per_token is not None:
    tokens_per_second = ASSUMED_MFU * flops.PEAK_FLOPS[gpu] / (flops.TRAINING_FACTOR * per_token)
    source = f"assumed, {ASSUMED_MFU:.0%} MFU: --tokens-per-second has what was measured"
  if tokens_per_second is None or cfg.optimizer.lora_rank is not None:
    return []  # without a speed, or with few gradients
  model = scaling.Scaling(cfg, tokens_per_second, gpu, interconnect)
  tokens = cfg.global_batch * cfg.seq_len / mesh.size
  sizes = dict(mesh.shape)
  seconds, links = model.step_seconds(sizes), scaling.INTERCONNECTS[interconnect].description
  rows = {"of linear": [f"{count:>7,}" for count in scaling.COUNTS]} | {
    name: [f"{x:7.3f}" for x in found] for name, found in model.table(tokens).items()
  }
  of_one = f"one: {tokens_per_second:,.0f} tokens/s ({source})"
  return [
    f"predicted   {1e3 * seconds:,.1f} ms per step, {mesh.size * tokens / seconds:,.0f} tokens/s, "
    f"{model.efficiency(sizes):.3f} of linear",
    f"            {mesh.size} x {gpu}, {links}; {of_one}",
    f"            with {tokens:,.0f} tokens each, accumulate={cfg.accumulate}, on more devices:",
    *(f"            {name:<18}{''.join(found)}" for name, found in rows.items()),
  ]


def weight_decay(rate: float, params: Any) -> str:
  """Describes what decays: how many parameters, and the names of those that do not."""
  count, exempt = 0, set()
  flat, _ = jax.tree_util.tree_flatten_with_path(params)
  for (path, leaf), decays in zip(flat, jax.tree.leaves(weight_decay_mask(params)), strict=True):
    keys = [entry.key for entry in path]
    if decays:
      count += leaf.size
    else:
      exempt.add("/".join(keys[-2:]) if keys[-1] in ("bias", "scale") else keys[-1])
  return f"weight decay {rate:g} of {count:,} parameters; not of {', '.join(sorted(exempt))}"
