"""A training run, from its config to its run folder."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from lnssm_jax.ops.core import recording
from train import callbacks, config
from train.checkpoint import store
from train.checkpoint.saver import Saver
from train.checkpoint.store import CheckpointError, Checkpoints
from train.cluster import agreement, compile_cache, device_mesh, distributed
from train.cluster.stop_signal import StopSignal
from train.data import preflight
from train.data.tokenize import prepare
from train.data.windows import Mixture, TokenWindows, train_batches
from train.logging import loggers, run_summary
from train.logging.console import Console, eval_line
from train.logging.metric_reader import DivergedError, MetricReader
from train.logging.tracing import Tracer
from train.runs import bindings, run_folder
from train.runs.evaluation import Evaluator
from train.runs.rows import Row
from train.runs.run_folder import RunFolder
from train.step import memory
from train.step.model import model_graph
from train.step.optimizer import make_optimizer
from train.step.state import State, abstract_batch, abstract_state, init_state
from train.step.step_guard import init_statistics
from train.step.train_step import Batch, make_train_step


@dataclasses.dataclass(frozen=True)
class Result:
  """Outcome of `fit`."""

  step: int  # total steps of the run, including earlier calls
  stopped_by: str | None  # name of the signal; None if the run is complete
  validation: list[Row]  # of the last step; empty if stopped before it
  state: State
  ended_by: str | None = None  # what a callback said that ended the run before its last step


def fit(
  cfg: config.Train,
  *,
  allow_config_change: bool = False,
  verify_data: bool = False,
  profile: range | None = None,
  claimed: RunFolder | None = None,
) -> Result:
  """Trains until `cfg.steps`, resuming from the newest checkpoint in `cfg.run_dir` if any.

  A run that is stopped (SIGINT, SIGTERM, or a crash) and resumed gives the same numbers as one that
  never stopped, bit for bit on the same device.

  Args:
    allow_config_change: resume even if the settings or the training text have changed.
    verify_data: compare every byte of the token files with their digests, not only sampled blocks.
    profile: steps to trace (`train.logging.tracing`).
    claimed: the run folder, if the caller has locked it (`train.runs.run_folder.claim`).

  Raises:
    ValueError: the run folder, the data or the mesh does not match the config, or the processes of
      the run differ in settings, data, code or packages (`train.cluster.agreement`).
    DivergedError: too many consecutive steps were not finite (or spikes); the parameters from
      before them are saved.
    CheckpointError: the last checkpoint could not be written, or no existing one can be read.
  """
  console = Console(quiet=not distributed.is_first())
  loggers.check(cfg.watch)
  options = {"allow_config_change": allow_config_change, "verify_data": verify_data}
  claiming = {"allow_config_change": allow_config_change}
  agreement.check(lambda: {"settings": config.to_dict(cfg), **options, **agreement.software()})
  with contextlib.ExitStack() as stack:
    graph = model_graph(cfg.model)  # a misspelled mixer is not another run's setting
    called = callbacks.made(cfg)
    run = claimed or stack.enter_context(run_folder.claim(cfg, **claiming, say=console.say))
    programs = compile_cache.folder(cfg.compile_cache, run.path)
    stack.enter_context(compile_cache.at(programs))
    mesh = device_mesh.make_mesh(cfg)
    run_summary.devices(console, mesh)
    check_run = not allow_config_change
    if not claimed:  # rows of a sweep would be removed
      distributed.on_first(run.check_not_of_a_sweep)
    at = distributed.on_first(lambda: _check_data(cfg, run, check_run=check_run))
    train_step = None
    if at < cfg.steps:  # before the text is tokenized, which may take hours
      train_step = compile_step(cfg, graph, mesh, run.kernels, console)
      check_memory(cfg, mesh, train_step, console)
    inputs = _prepare(cfg, whole=verify_data)
    windows = distributed.on_all(lambda: training_set(cfg))
    evaluator = distributed.on_all(lambda: Evaluator(cfg, graph, mesh, run.kernels))

    stop = stack.enter_context(StopSignal())
    checkpoints = stack.enter_context(
      Checkpoints(
        run.checkpoints,
        keep=cfg.keep_checkpoints,
        say=console.say,
        before=run.before_checkpoint,
      )
    )
    state, start = _begin(cfg, mesh, checkpoints, run, None if allow_config_change else inputs)
    run.write_config(cfg)
    if distributed.is_first():
      run.on_rows = stack.enter_context(loggers.Loggers(cfg, run.path, start, console.say)).write
    run_summary.start(console, cfg, run, state, windows, start)
    step = start
    reader = MetricReader(cfg, run, console, list(mesh.devices.flat))
    metadata = lambda step: {
      "data_position": step,
      "rows": run.row_count(),
      **inputs,
      "config": config.to_dict(cfg),
    }
    saver = Saver(
      checkpoints, every=cfg.checkpoint_every, start=start, metadata=metadata, say=console.say
    )
    alone, ended_by = distributed.count() == 1, None

    def stopping() -> bool:  # the same value in all processes
      return (bool(stop) if alone else reader.votes[0]) or ended_by is not None

    def call(method: str) -> None:
      nonlocal ended_by
      if not called:
        return
      rows = distributed.on_first(run.read_rows)  # which other processes may not see yet
      rows = [row for row in rows if row["kind"] == "eval"]
      about = cfg, step, state, graph, run.path, rows, lambda: metadata(step), console.say
      for one in called:
        ended_by = getattr(one, method)(callbacks.Moment(*about)) or ended_by

    def evaluate():
      is_due = step == cfg.steps or step % cfg.eval_every == 0
      is_due &= step > 0 or cfg.eval_at_start
      if is_due and not stopping() and not run.evaluation(step, cfg.data.validation):
        options = {"should_stop": lambda: stop, "progress": console.progress}
        rows = evaluator(step, state["params"], **options)
        if rows and "ema" in state:
          averaged = evaluator(step, state["ema"], **options)
          if not averaged:
            return
          rows = [
            row | {"ema_val_loss": x["val_loss"]} for row, x in zip(rows, averaged, strict=True)
          ]
        for row in run.append(rows):
          console.say(eval_line(row))
        call("evaluated")

    def unchanged():  # no checkpoint has seen text other than that of the run
      distributed.on_all(lambda: bindings.check_in_use(inputs["data"], cfg.data.folder))

    call("started")
    evaluate()
    if start < cfg.steps:
      train_step = train_step or compile_step(cfg, graph, mesh, run.kernels, console)
      tracer = Tracer(run.path, profile, console.say, train_step.as_text)
      stack.callback(tracer.close)
      batches = stack.enter_context(_feed(windows, cfg, mesh, start))
      reader.start_clock()
      try:
        while step < cfg.steps and not stopping():
          run.check()
          begin = time.perf_counter()
          batch, failed = next(batches), saver.failed_here()
          reader.waited(time.perf_counter() - begin)
          if not alone:
            batch["votes"] = distributed.ballot(mesh, (bool(stop), failed))
          tracer.before(step + 1)
          state, metrics = train_step(state, batch)
          step += 1
          tracer.after(step, metrics)
          reader.push(step, metrics)
          if failed if alone else reader.votes[1]:
            saver.retry(step)
          if step % cfg.eval_every == 0 or saver.is_due(step):
            reader.flush()  # saved parameters must be finite, with their rows in metrics.jsonl
            evaluate()
            if saver.is_due(step):
              unchanged()
              saver.save(step, state)
            reader.restart_clock()
        reader.flush()
      except DivergedError as error:
        if error.weights_are_good:
          saver.finish(step, state)
        raise
      evaluate()
      unchanged()
      saver.finish(step, state)

    stopped_by = None
    if ended_by is not None:
      console.say(f"ended after step {step} by {ended_by}")
    if ended_by is None and (step < cfg.steps or stopping()):
      stopped_by = stop.name or "a signal to another process"
      run_summary.stopped(console, run, step, stopped_by)
    else:
      run_summary.finished(console, cfg, run, graph, state["params"], step)
    if stopped_by is None:
      call("finished")
    validation = run.evaluation(step, cfg.data.validation)
    return Result(
      step=step, stopped_by=stopped_by, validation=validation, state=state, ended_by=ended_by
    )


def _check_data(cfg: config.Train, run: RunFolder, *, check_run: bool) -> int:
  """Checks tokenizer and data before time is spent; returns the step of the newest checkpoint."""
  metadata = store.newest_metadata(run.checkpoints)
  if check_run:
    bindings.check_before_preparing(metadata, cfg.data)
  preflight.require(cfg)
  step = metadata.get("data_position")
  return step if type(step) is int else 0


def _prepare(cfg: config.Train, *, whole: bool) -> dict[str, Any]:
  """Creates missing token files; returns `bindings.inputs`, in which all processes agree."""
  least = preflight.windowed(cfg)
  sidecars = distributed.on_first(
    lambda: prepare(cfg.data, progress=True, whole=whole, least=least)
  )
  inputs = distributed.on_all(lambda: bindings.inputs(cfg.data, sidecars))
  agreement.check(lambda: inputs)
  return inputs


def _begin(
  cfg: config.Train,
  mesh: Mesh,
  checkpoints: Checkpoints,
  run: RunFolder,
  inputs: dict[str, Any] | None,  # `bindings.inputs`; None skips all comparisons
) -> tuple[State, int]:
  """Restores the newest state and its step, or initializes one; removes rows of later steps."""
  optional = {"spikes": init_statistics()}  # of a run that has changed `skip_spikes`
  restored = checkpoints.restore(abstract_state(cfg, mesh), optional)
  if restored is None:
    run.keep_rows_until(-1)
    return init_state(cfg, mesh, run.kernels), 0
  state, metadata = restored
  step = metadata.get("data_position")
  if type(step) is not int or step < 0 or not isinstance(metadata.get("data"), dict | None):
    raise CheckpointError(
      f"the newest checkpoint of {run.path} has no valid position "
      f"(data_position={step!r}); move its folder away to resume from the one before it."
    )
  if step > cfg.steps:
    raise ValueError(
      f"the run in {run.path} has already done {step} steps, more than steps={cfg.steps}; increase "
      "steps, or use another run_dir."
    )
  if inputs is not None:
    bindings.check_model(metadata, cfg.model, run.path)
    bindings.check_tokenizer(metadata, cfg.data, inputs["tokenizer"])
    changed = bindings.changed_sets(metadata.get("data") or {}, inputs["data"])
    if changed:
      raise bindings.BindingError(
        f"the text of {', '.join(changed)} in {cfg.data.folder} differs from that of the run in "
        f"{run.path}; restore it, use another run_dir, or resume with the new text by "
        "--allow-config-change."
      )
  rows = metadata.get("rows")
  run.keep_rows_until(step, rows if type(rows) is int else None)
  return state, step


def compile_step(
  cfg: config.Train, graph: Any, mesh: Mesh, kernels: Path | None, console: Console
) -> jax.stages.Compiled:
  """Compiles the training step ahead of time, so that its first call is as fast as the others.

  Prints which ops run without a kernel, and why.
  """
  tx, _ = make_optimizer(cfg.optimizer, cfg.steps, cfg.seed)
  batch = abstract_batch(cfg, mesh)
  if distributed.count() > 1:
    votes = distributed.ballot(mesh, (False, False))
    batch["votes"] = jax.ShapeDtypeStruct(votes.shape, votes.dtype, sharding=votes.sharding)
  begin = time.perf_counter()
  step = make_train_step(cfg, graph, tx, mesh, kernels)
  arguments = abstract_state(cfg, mesh), batch
  with recording.choices_of_xla() as in_xla:
    compiled = compile_cache.compiled(step, arguments, mesh, config.to_dict(cfg))
  console.say(f"compiled in {time.perf_counter() - begin:.1f} s")
  for line in recording.lines_of(in_xla):
    console.say(f"no kernel   {line}")
  return compiled


def check_memory(
  cfg: config.Train, mesh: Mesh, compiled: jax.stages.Compiled, console: Console
) -> None:
  """Prints the memory of the compiled step; raises ValueError if a device has less."""
  needed = memory.sizes(compiled)
  console.say(f"memory      {memory.describe(needed)}")
  distributed.on_all(lambda: memory.check(needed, mesh, cfg, console.say))


@contextlib.contextmanager
def _feed(
  windows: TokenWindows | Mixture, cfg: config.Train, mesh: Mesh, start: int
) -> Iterator[Iterator[Batch]]:
  """Context with the batches of steps start + 1, start + 2, ... on their devices."""
  where, size = device_mesh.batch_sharding(mesh), cfg.global_batch
  rows = distributed.local_rows(where, size)
  options = {"seed": cfg.seed, "order": cfg.data.order, "start": start}
  batches = train_batches(windows, global_batch=size, rows=rows, **options)
  with contextlib.closing(batches):
    yield (distributed.to_devices(batch, where, size, rows) for batch in batches)


def training_set(cfg: config.Train) -> TokenWindows | Mixture:
  """Opens the training sets of a config.

  Raises:
    DataError: as `TokenWindows`.
  """
  data = cfg.data
  how = cfg.seq_len, cfg.model.vocab_size, data.boundaries
  opened = lambda names: TokenWindows(
    [f"{data.folder}/{name}" for name in names],
    *how,
    whole=list(map(data.has_rows, names)),
    packed=data.pack_rows,
  )
  if isinstance(data.train, dict):
    return Mixture({name: opened([name]) for name in data.train}, data.train)
  return opened(data.train)
