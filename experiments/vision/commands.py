"""The commands of image classifiers: `classify` trains one, `evaluate` scores it."""

import argparse
import dataclasses
import functools

from experiments.vision.settings import Vision
from train import config
from train.cli.commands import code_of
from train.cli.main import add_training
from train.cli.program import Commands
from train.cluster.stop_signal import StopSignal
from train.messages import show, show_json
from train.runs import config_file
from train.scoring import arguments


def add_commands(added: Commands) -> None:
  """Adds both to a program."""
  training = added.add("classify", classify, "Train an image classifier, or resume it.")
  training.settings = Vision
  arguments.add_config(training)
  add_training(training)
  scoring = added.add("evaluate", evaluate, "Print loss and accuracy of an image classifier.")
  where = "the run_dir of a run of `classify`"
  scoring.add_argument("--run-dir", metavar="FOLDER", required=True, help=where)
  arguments.add_set(scoring)
  scoring.add_argument("--json", action="store_true", help="print JSON instead of a line")


def classify(options: argparse.Namespace) -> int | None:
  """Trains an image classifier; with --print-config or --dry-run only describes the run."""
  cfg = config.apply_overrides(config.load(options.config, Vision), options.set)
  from experiments.vision import loop

  if options.print_config:
    loop.model_graph(cfg.model)
    show_json(config.to_dict(cfg))
    return None
  if options.dry_run:
    describe(cfg)
    return None
  code = functools.partial(code_of, stopped_code=options.stopped_code)
  with StopSignal(code) as stop:
    result = loop.fit(cfg, allow_config_change=options.allow_config_change, stop=stop)
    return code(result.stopped_by)


def evaluate(options: argparse.Namespace) -> None:
  """Prints the scores of the newest checkpoint of a run."""
  from experiments.vision import loop

  cfg = config_file.read(options.run_dir, Vision)
  cfg = dataclasses.replace(cfg, run_dir=options.run_dir)  # it may have been moved
  row = loop.evaluate_run(config.apply_overrides(cfg, options.set))
  show_json([row]) if options.json else show(loop.scores(row))


def describe(cfg: Vision) -> None:
  """Prints parameters and memory of a run, without its images."""
  import jax
  import jax.numpy as jnp

  from experiments.vision import loop
  from experiments.vision.batches import Batch
  from lnssm_jax.models import count_parameters
  from train.cli.dry_run import weight_decay
  from train.step import memory

  initialize, train_step, _ = loop.make_steps(cfg, epoch=1)
  state = jax.eval_shape(initialize, jax.random.key(cfg.seed))
  B, size, channels = cfg.global_batch, cfg.model.image_size, cfg.model.channels
  images = jax.ShapeDtypeStruct((B, size, size, channels), jnp.uint8)
  numbers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  weight = jax.ShapeDtypeStruct((), jnp.float32)
  batch = Batch(images, numbers(B), numbers(B, 4), numbers(4), weight, weight)
  show(f"model       {cfg.model.mixer}, {count_parameters(state['params']):,} parameters")
  if cfg.optimizer.weight_decay:
    show(f"decay       {weight_decay(cfg.optimizer.weight_decay, state['params'])}")
  compiled = train_step.lower(state, batch).compile()
  show(f"memory      {memory.describe(memory.sizes(compiled))}", flush=True)
