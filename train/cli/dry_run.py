"""`lnssm-train fit --dry-run`: checks a run and prints its memory and FLOPs.

Reads no text, initializes no parameters, and writes only programs, for the first start of the run.
"""

import math
from typing import Any

import jax

from lnssm_jax.files import buckets
from lnssm_jax.files.buckets import Bucket
from lnssm_jax.pretrained import hugging_face
from train import config
from train.cluster import compile_cache, distributed
from train.cluster.device_mesh import make_mesh
from train.data import preflight
from train.logging import run_summary
from train.logging.console import Console, short
from train.step import flops, memory
from train.step.model import check_length, model_graph
from train.step.optimizer import weight_decay_mask
from train.step.state import abstract_state
from train.trainer import check_memory, compile_step


def describe(cfg: config.Train) -> None:
  """Prints devices, parameters, memory per device and FLOPs per step of a run with config `cfg`.

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
