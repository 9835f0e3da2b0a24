"""A training run of an image classifier, from its config to its run folder."""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from experiments.vision.batches import (
  Batch,
  evaluation_batches,
  normalized,
  on_device,
  training_batches,
)
from experiments.vision.images import DataError, Images, open_images
from experiments.vision.settings import Model, Vision
from lnssm_jax.models import VisionModel, count_parameters
from train import config, loop
from train.checkpoint import store
from train.checkpoint.saver import Saver
from train.checkpoint.store import Checkpoints
from train.cluster import stop_signal
from train.cluster.stop_signal import StopSignal
from train.logging.console import Console
from train.loop import Callback, DivergedError, Moment
from train.runs import run_folder
from train.runs.evaluation import Evaluation
from train.runs.rows import Row
from train.step.loss import LossSums
from train.step.model import params_of
from train.step.optimizer import make_optimizer
from train.step.state import State
from train.step.step import Rules, step


@dataclasses.dataclass(frozen=True)
class Result:
  """Outcome of `fit`."""

  step: int
  stopped_by: str | None  # name of the signal; None if the run is complete
  validation: Row | None  # of the last step, if it ends an epoch
  state: State


def fit(
  cfg: Vision, *, allow_config_change: bool = False, stop: StopSignal | None = None
) -> Result:
  """Trains for `cfg.epochs`, resuming from the newest checkpoint in `cfg.run_dir` if any.

  A run that is stopped and resumed gives the same numbers as one that never stopped. The batch is
  sharded over all devices of this process.

  Raises:
    ValueError: the images, the run folder or the devices do not match the config.
    DivergedError: `max_skipped` consecutive steps were not finite.
    CheckpointError: the last checkpoint could not be written, or no existing one can be read.
  """
  console = Console()
  with contextlib.ExitStack() as stack:
    claiming = {"allow_config_change": allow_config_change}
    run = stack.enter_context(run_folder.claim(cfg, **claiming, say=console.say))
    train, validation = _open(cfg)
    epoch = len(train) // cfg.global_batch
    whole, rows = _shardings(cfg)
    initialize, train_step, evaluate = make_steps(cfg, epoch)
    checkpoints = stack.enter_context(
      Checkpoints(
        run.checkpoints,
        keep=cfg.keep_checkpoints,
        say=console.say,
        before=run.before_checkpoint,
      )
    )
    state, step = _begin(cfg, initialize, checkpoints, whole)
    run.keep_rows_until(step)
    run.write_config(cfg)
    saver = Saver(
      checkpoints,
      every=cfg.checkpoint_every * epoch,
      start=step or -1,
      metadata=lambda step: {"data_position": step, "config": config.to_dict(cfg)},
      say=console.say,
    )
    console.say(
      f"{cfg.model.mixer}, {count_parameters(state['params']):,} parameters; {len(train):,} images,"
      f" {epoch} steps per epoch, from step {step}"
    )
    evaluation = Evaluation(
      run,
      lambda step, state: [_validate(step, state, validation, cfg, evaluate, rows)],
      lambda row: f"epoch {row['step'] // epoch}  {scores(row)}",
      every=epoch,
      steps=cfg.epochs * epoch,
      sets=("validation",),
    )
    stop = stack.enter_context(stop_signal.begun(stop))
    stream = stack.enter_context(training_batches(train, cfg, step))
    batches = (jax.device_put(x, Batch(rows, rows, rows, whole, whole, whole)) for x in stream)
    called = [run, _Logging(cfg, epoch, run, console), evaluation, saver]
    before = run.evaluations()
    now = Moment(step, state, called, stop=lambda: stop, evaluations=before, say=console.say)
    loop.train(now, train_step, batches, steps=cfg.epochs * epoch)
    return Result(now.step, stop.name, next(iter(evaluation.rows(now)), None), now.state)


class _Logging(Callback):
  """Rows of every few steps, of pauses, and of steps that were skipped."""

  def __init__(self, cfg: Vision, epoch: int, run: run_folder.RunFolder, console: Console):
    self._cfg, self._epoch, self._run, self._console = cfg, epoch, run, console
    self._begin, self._since = 0.0, -1
    self._failures = 0
    self._last: Any = None  # metrics of the step before, which have been computed by now

  def before_step(self, now: Moment) -> None:
    if self._since < 0 or now.step % self._epoch == 0:
      self._begin, self._since = time.perf_counter(), now.step

  def after_step(self, now: Moment) -> None:
    skipped = self._last is not None and float(self._last["skipped"])
    self._failures = self._failures + 1 if skipped else 0
    if self._failures == self._cfg.max_skipped:
      raise DivergedError(
        f"the last {self._failures} steps, up to {now.step - 1}, were skipped, as their loss or"
        " gradient is not finite; lower optimizer.peak_lr, or set optimizer.clip_norm=1.0."
      )
    self._last = now.metrics

  def pauses(self, step: int) -> bool:
    return step % self._cfg.log_every == 0

  def paused(self, now: Moment) -> None:
    loss, of_epoch = float(now.metrics["loss"]), now.step / self._epoch
    images = (now.step - self._since) * self._cfg.global_batch
    speed = images / (time.perf_counter() - self._begin)
    row = {"kind": "train", "step": now.step, "epoch": of_epoch, "loss": loss}
    row |= {"images_per_second": speed}
    if float(now.metrics["skipped"]):
      row = {"kind": "skipped", "step": now.step, "why": "not finite"}
      row |= {"loss": None, "grad_norm": None}
    self._run.append([row])
    self._console.progress(f"epoch {of_epoch:.2f}  loss {loss:.4f}  {speed:.0f} images/s")


def evaluate_run(cfg: Vision) -> Row:
  """Evaluates the newest checkpoint in `cfg.run_dir` on all validation images; the row of it.

  Raises:
    FileNotFoundError: there is no checkpoint.
    CheckpointError: it cannot be read.
    ValueError: the images do not match the config.
  """
  validation = _open_validation(cfg)
  whole, rows = _shardings(cfg)
  initialize, _, evaluate = make_steps(cfg, epoch=1)
  abstract = _abstract_state(cfg, initialize, whole)
  models = {name: abstract[name] for name in ("params", "ema") if name in abstract}
  state, step, _ = store.load(run_folder.RunFolder(cfg.run_dir).checkpoints, models)
  return _validate(step, state, validation, cfg, evaluate, rows)


def scores(row: Row) -> str:
  """The numbers of a row of an evaluation."""
  line = f"val_loss {row['val_loss']:.4f}  accuracy {row['accuracy']:.4f}"
  if "ema_val_loss" in row:
    line += f"  of the average {row['ema_val_loss']:.4f}, {row['ema_accuracy']:.4f}"
  return line


def build_model(model: Model, key: jax.Array) -> VisionModel:
  """Builds the model of a config with randomly initialized parameters."""
  values = config.to_dict(model) | {"dtype": jnp.dtype(model.dtype)}
  return VisionModel(**values, rngs=nnx.Rngs(key))


def model_graph(model: Model) -> Any:
  """Static part of the model for `nnx.merge(graph, params)`; computes no parameters."""
  return nnx.split(jax.eval_shape(lambda: build_model(model, jax.random.key(0))))[0]


def make_steps(cfg: Vision, epoch: int) -> tuple[Callable, jax.stages.Wrapped, jax.stages.Wrapped]:
  """The compiled functions of a run whose epochs have `epoch` steps.

  Returns:
    key -> state; (state, batch) -> (state, metrics of `train.step.step`), which donates the state;
    (params, images uint8, labels, whether they count) -> sums over those images of the loss, of
    hits, and of 1.
  """
  graph = model_graph(cfg.model)
  warmup = cfg.warmup_epochs * epoch
  optimizer = dataclasses.replace(cfg.optimizer, warmup_steps=warmup)
  tx, schedule = make_optimizer(optimizer, cfg.epochs * epoch)
  rules = Rules(of_mean=True, tx=tx, schedule=schedule, ema_decay=cfg.optimizer.ema_decay)

  def initialize(key):
    params = params_of(build_model(cfg.model, key))
    state = {"params": params, "opt_state": tx.init(params), "step": jnp.int32(0)}
    if cfg.optimizer.ema_decay is not None:
      state["ema"] = jax.tree.map(jnp.array, params)
    return state

  def train_step(state, batch):
    key = jax.random.fold_in(jax.random.key(cfg.seed), state["step"])
    of_noise, of_dropout = jax.random.split(key)
    images, targets = on_device(batch, cfg, of_noise)

    def loss(params, batch):
      logits = nnx.merge(graph, params)(batch["images"], dropout_key=of_dropout)
      mean = optax.softmax_cross_entropy(logits, batch["targets"]).mean()
      return LossSums(nats=mean, weight=jnp.float32(1), penalty=jnp.float32(0)), None

    state, metrics = step(loss, state, {"images": images, "targets": targets}, rules)
    return state, {"loss": metrics["loss"], "skipped": metrics["skipped"]}

  def evaluate(params, images, labels, counts):
    logits = nnx.merge(graph, params)(normalized(images, cfg.data))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    hits = logits.argmax(-1) == labels
    return [jnp.sum(counts * x) for x in (losses, hits, jnp.ones_like(losses))]

  return initialize, jax.jit(train_step, donate_argnums=0), jax.jit(evaluate)


def _open(cfg: Vision) -> tuple[Images, Images]:
  """The training and the validation images, which go together and with the model."""
  train, validation = open_images(cfg.data.train), _open_validation(cfg)
  _check_classes(train, cfg)
  if len(train) < cfg.global_batch:
    raise DataError(
      f"{cfg.data.train} has {len(train)} images, less than global_batch={cfg.global_batch}."
    )
  return train, validation


def _open_validation(cfg: Vision) -> Images:
  validation = open_images(cfg.data.validation)
  _check_classes(validation, cfg)
  return validation


def _check_classes(images: Images, cfg: Vision) -> None:
  count, most = len(images.classes), cfg.model.num_classes
  if count > most:
    raise DataError(f"the images have {count} classes, model.num_classes={most}.")


def _shardings(cfg: Vision) -> tuple[NamedSharding, NamedSharding]:
  """Replicated, and sharded by rows, over all devices."""
  if jax.process_count() > 1:
    raise ValueError("classify runs in one process, on all of its devices; start only one.")
  devices = jax.device_count()
  if cfg.global_batch % devices:
    raise ValueError(
      f"global_batch={cfg.global_batch} is not a multiple of the {devices} devices; use "
      f"{max(1, cfg.global_batch // devices) * devices}."
    )
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((devices,), ("data",), axis_types=auto)
  return NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))


def _begin(
  cfg: Vision, initialize: Callable, checkpoints: Checkpoints, whole: NamedSharding
) -> tuple[State, int]:
  """Restores the newest state and its step, or initializes one."""
  restored = checkpoints.restore(_abstract_state(cfg, initialize, whole))
  if restored is None:
    return jax.jit(initialize, out_shardings=whole)(jax.random.key(cfg.seed)), 0
  return restored[0], int(restored[0]["step"])


def _abstract_state(cfg: Vision, initialize: Callable, whole: NamedSharding) -> State:
  """Shape, dtype and sharding of every leaf of the state, without allocating any."""
  describe = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)
  return jax.tree.map(describe, jax.eval_shape(initialize, jax.random.key(cfg.seed)))


def _validate(
  step: int,
  state: State,
  images: Images,
  cfg: Vision,
  evaluate: Callable,
  rows: NamedSharding,
) -> Row:
  """The row of metrics.jsonl of an evaluation of the parameters, and of their average if any."""
  models = {"": state["params"], "ema_": state.get("ema")}
  sums = {name: np.zeros(3) for name, params in models.items() if params is not None}
  for batch in evaluation_batches(images, cfg):
    batch = jax.device_put(batch, rows)
    for name in sums:
      sums[name] += [float(x) for x in evaluate(models[name], *batch)]
  row = {"kind": "eval", "step": step, "set": "validation", "images": int(sums[""][2])}
  for name, (loss, hits, count) in sums.items():
    row |= {f"{name}val_loss": loss / count, f"{name}accuracy": hits / count}
  return row
