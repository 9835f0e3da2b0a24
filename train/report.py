"""What a run tells its user at the start and at the end."""

import shlex
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from lnssm_jax.models import count_parameters
from train import config, distributed, sample
from train.data.tokenizers import load_tokenizer
from train.metrics import Console, short
from train.run_folder import RunFolder
from train.step import State


def devices(console: Console, mesh: Mesh) -> None:
  """Which devices are used, and how."""
  kind, sizes = mesh.devices.flat[0].device_kind, dict(mesh.shape)
  layout = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
  shared = f" in {distributed.count()} processes" if distributed.count() > 1 else ""
  console.say(f"device      {kind} x {mesh.size}{shared} (mesh: {layout})")


def start(
  console: Console, cfg: config.Train, run: RunFolder, state: State, windows: int, step: int
) -> None:
  """What is trained, on how much, and where it is written."""
  tokens = cfg.steps * cfg.global_batch * cfg.seq_len
  once = windows * cfg.seq_len
  console.say(f"model       {cfg.model.mixer}, {count_parameters(state['params']):,} parameters")
  times = f"{tokens / once:.2g}"
  console.say(f"data        {short(once)} tokens, seen {times} times in {cfg.steps} steps")
  console.say(f"run folder  {run.path}")
  if step:
    console.say(f"resuming    after step {step} of {cfg.steps}")
    for line in run.changes.values():
      console.say(f"changed     {line}")


def stopped(console: Console, run: RunFolder, step: int, signal: str | None) -> None:
  """Where a run stands that was stopped."""
  console.say(f"stopped by {signal} after step {step}; saved. Run the same command to go on.")
  console.say(f"run folder   {run.path}")


def finished(console: Console, cfg: config.Train, run: RunFolder, graph: Any, params: Any) -> None:
  """A sample of text, where everything lies, and how to get more."""
  console.say(f"finished {cfg.steps} steps")
  if cfg.sample.tokens and distributed.count() == 1:  # else no process holds all parameters
    tokenizer = load_tokenizer(cfg.data.tokenizer, cfg.data.folder)
    model = nnx.merge(graph, params)
    text = sample.complete(model, tokenizer, [cfg.sample.prompt], cfg.sample, cfg.seed)[0]
    console.say(f"sample\n{'-' * 40}\n{cfg.sample.prompt}{text}\n{'-' * 40}")
  elif cfg.sample.tokens:
    console.say("no sample of text: each of the processes holds a part of the model")
  console.say(f"settings     {run.config_file}")
  console.say(f"metrics      {run.metrics_file}")
  console.say(f"checkpoints  {run.checkpoints}")
  folder, prompt = shlex.quote(str(run.path)), shlex.quote(cfg.sample.prompt or "The ")
  console.say(f"more text    python -m train generate --run-dir {folder} --prompt {prompt}")
