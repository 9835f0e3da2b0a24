"""Messages at the start and at the end of a run."""

from typing import Any

import jax
from jax.sharding import Mesh

from lnssm_jax.files.printable import shell_word
from lnssm_jax.models import count_parameters
from train import config
from train.callbacks import sample_of
from train.cluster import distributed
from train.data.sources import STDLIB
from train.data.streams import Stream
from train.data.windows import Mixture, TokenWindows
from train.logging.console import Console, short
from train.runs.run_folder import RunFolder
from train.step import flops
from train.step.model import build_model
from train.step.state import State


def devices(console: Console, mesh: Mesh) -> None:
  """Prints the devices and the mesh."""
  kind, sizes = mesh.devices.flat[0].device_kind, dict(mesh.shape)
  layout = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
  shared = f" in {distributed.count()} processes" if distributed.count() > 1 else ""
  console.say(f"device      {kind} x {mesh.size}{shared} (mesh: {layout})")


def describe(model: config.Model, params: Any) -> str:
  """The mixer and the number of parameters, with those that a token uses if it selects experts."""
  count = count_parameters(params)
  idle = flops.idle_entries(jax.eval_shape(lambda: build_model(model, jax.random.key(0))))
  active = f", of which a token uses {count - idle:,}" if idle else ""
  return f"{model.mixer}, {count:,} parameters{active}"


def other_validation(data: config.Data) -> list[str]:
  """Validation sets that are still the default text, where none of training is."""
  sets = lambda names: [name for name in names if data.sources.get(name) == STDLIB]
  return [
    f"on {STDLIB}, not on your text: --set data.sources.{name}=TEXT takes another"
    for name in sets(data.validation)
    if not sets(data.train)
  ]


def start(
  console: Console,
  cfg: config.Train,
  run: RunFolder,
  state: State,
  source: TokenWindows | Mixture | Stream,
  step: int,
) -> None:
  """Prints the model, the amount of data and the run folder."""
  console.say(f"model       {describe(cfg.model, state['params'])}")
  rows = cfg.steps * cfg.global_batch
  crops = "" if cfg.data.order == "windows" else " of random crops"
  amount = lambda windows, epochs: (
    f"{short(len(windows) * cfg.seq_len)} tokens, {epochs:.2g} epochs{crops} in {cfg.steps} steps"
  )
  if isinstance(source, Stream):
    total = short(rows * cfg.seq_len)
    console.say(f"data        {source.source}, as it is read: {total} tokens in {cfg.steps} steps")
  elif isinstance(source, Mixture):
    for name, epochs in source.epochs(rows).items():
      share = f"{name}, {source.shares[name]:.1%} of the rows"
      console.say(f"data        {share}: {amount(source.sets[name], epochs)}")
  else:
    console.say(f"data        {amount(source, rows / len(source))}")
  for line in other_validation(cfg.data):
    console.say(f"validation  {line}")
  console.say(f"run folder  {run.path}")
  if step:
    console.say(f"resuming    after step {step} of {cfg.steps}")
    for line in run.changes.values():
      console.say(f"changed     {line}")


def stopped(console: Console, run: RunFolder, step: int, signal: str | None) -> None:
  """Prints where a run stopped and how to resume it."""
  console.say(f"stopped by {signal} after step {step}; saved. Run the same command to resume.")
  console.say(f"run folder   {run.path}")


def finished(
  console: Console, cfg: config.Train, run: RunFolder, graph: Any, params: Any, step: int
) -> None:
  """Prints a text sample, the paths of all results, and how to generate more text."""
  console.say(f"finished {step} steps")
  if cfg.sample.tokens and distributed.count() == 1:  # otherwise no process has all parameters
    try:
      sample = sample_of(cfg, graph, params)
      console.say(f"sample\n{'-' * 40}\n{sample}\n{'-' * 40}")
    except ValueError as error:  # the run is complete, whatever its model writes
      console.say(f"no text sample: {error}")
  elif cfg.sample.tokens:
    console.say("no text sample: no process has all parameters of the model")
  console.say(f"settings     {run.config_file}")
  console.say(f"metrics      {run.metrics_file}")
  console.say(f"checkpoints  {run.checkpoints}")
  console.say(
    f"more text    lnssm-train generate --run-dir {shell_word(run.path)} --prompt"
    f" {shell_word(cfg.sample.prompt or 'The ')}"
  )
