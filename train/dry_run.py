"""`python -m train fit --dry-run`: the training step compiled for these devices, and what it needs.

Nothing is written, no text is read and no parameter is made.
"""

import jax

from lnssm_jax.models import count_parameters
from train import compile_cache, config, distributed, flops, report
from train.loop import compile_step
from train.mesh import make_mesh
from train.metrics import Console, short
from train.step import abstract_state, model_graph


def describe(cfg: config.Train) -> None:
  """Prints devices, parameters, memory a device and FLOPs a step of a run of these settings.

  Memory is the compiler's plan for the training step: arguments (parameters, optimizer, batch),
  results that do not take the place of arguments, and temporary arrays. Batches read ahead and the
  copy of the state that a save makes are not in it. With several processes, of the first one's
  program; the others' are the same.

  Raises:
    ValueError: the mesh does not fit the devices or the batch.
  """
  console = Console(quiet=not distributed.is_first())
  with compile_cache.at(cfg.compile_cache):
    mesh = make_mesh(cfg)
    report.devices(console, mesh)
    params = abstract_state(cfg, mesh)["params"]
    console.say(f"model       {cfg.model.mixer}, {count_parameters(params):,} parameters")
    compiled = compile_step(cfg, model_graph(cfg.model), mesh, None, console)
  console.say(f"memory      {_memory(compiled)}")
  stats = mesh.local_devices[0].memory_stats()
  if stats and "bytes_limit" in stats:
    console.say(f"available   {_gib(stats['bytes_limit'])} on each device")
  tokens = cfg.global_batch * cfg.seq_len
  model = flops.TRAINING_FACTOR * flops.model_flops_per_token(cfg.model, cfg.seq_len) * tokens
  console.say(
    f"FLOPs       {model:.4g} a step of {short(tokens)} tokens by formula, {model / mesh.size:.4g} "
    "a device"
  )


def _memory(compiled: jax.stages.Compiled) -> str:
  plan = compiled.memory_analysis()
  if plan is None:
    return "this backend does not say"
  sizes = {
    "arguments": plan.argument_size_in_bytes,
    "new results": plan.output_size_in_bytes - plan.alias_size_in_bytes,
    "temporary": plan.temp_size_in_bytes,
    "code": plan.generated_code_size_in_bytes,
  }
  parts = ", ".join(f"{name} {_gib(size)}" for name, size in sizes.items() if size)
  return f"{_gib(sum(sizes.values()))} a device: {parts}"


def _gib(size: int) -> str:
  return f"{size / 2**30:.2f} GiB" if size >= 2**29 else f"{size / 2**20:.2f} MiB"
