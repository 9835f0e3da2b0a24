"""A training run of a language model, from its config to its run folder."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from lnssm_jax.files import buckets
from lnssm_jax.files.buckets import local
from lnssm_jax.ops.core import dispatch, recording
from train import callbacks, config, loop
from train.checkpoint import store
from train.checkpoint.saver import Saver
from train.checkpoint.store import CheckpointError, Checkpoints
from train.cluster import agreement, compile_cache, device_mesh, distributed, stop_signal
from train.cluster.stop_signal import StopSignal
from train.data import preflight
from train.data.errors import DataError
from train.data.sources import TEXT_FIELDS
from train.data.streams import Stream, StreamBatches
from train.data.tokenize import prepare
from train.data.tokenizers import tokenizer_of
from train.data.windows import Mixture, TokenWindows, TrainBatches, train_batches
from train.logging import loggers, run_summary
from train.logging.console import Console, eval_line
from train.logging.metric_reader import MetricReader
from train.logging.tracing import Tracer
from train.loop import Moment
from train.runs import bindings, reference, run_folder
from train.runs.bucket import Mirror
from train.runs.evaluation import Evaluation, Evaluator
from train.runs.rows import Row
from train.runs.run_folder import RunFolder
from train.step import memory
from train.step.model import check_length, model_graph
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
  stop: StopSignal | None = None,
) -> Result:
  """Trains until `cfg.steps`, resuming from the newest checkpoint in `cfg.run_dir` if any.

  A run that is stopped (SIGINT, SIGTERM, or a crash) and resumed gives the same numbers as one that
  never stopped, bit for bit on the same device.

  Args:
    allow_config_change: resume even if the settings or the training text have changed.
    verify_data: compare every byte of the token files with their digests, not only sampled blocks.
    profile: steps to trace (`train.logging.tracing`).
    claimed: the run folder, if the caller has locked it (`train.runs.run_folder.claim`).
    stop: what ends the run; None: signals (`train.cluster.stop_signal`), while it trains.

  Raises:
    ValueError: the run folder, the data or the mesh does not match the config, or the processes of
      the run differ in settings, data, code or packages (`train.cluster.agreement`).
    DivergedError: too many consecutive steps were not finite (or spikes); the parameters from
      before them are saved.
    CheckpointError: the last checkpoint could not be written, or no existing one can be read.
  """
  console = Console(quiet=not distributed.is_first())
  loggers.check(cfg.watch)
  claiming = {"allow_config_change": allow_config_change}
  options = claiming | {"verify_data": verify_data}
  agreement.check(lambda: {"settings": config.to_dict(cfg), **options, **agreement.software()})
  with contextlib.ExitStack() as stack:
    graph = model_graph(cfg.model)  # a misspelled mixer is not another run's setting
    check_length(cfg.model, "seq_len", cfg.seq_len)
    called = callbacks.made(cfg)
    run = claimed or stack.enter_context(run_folder.claim(cfg, **claiming, say=console.say))
    mirror = []
    if buckets.is_bucket(cfg.run_dir):
      where = cfg.run_dir, run.path, cfg.keep_checkpoints
      mirror.append(stack.enter_context(Mirror(*where, console.say)))
    programs = compile_cache.folder(cfg.compile_cache, run.path)
    if programs and cfg.compile_cache == compile_cache.IN_RUN:
      compile_cache.take_from_dry_run(config.to_dict(cfg), run.path)
    stack.enter_context(compile_cache.at(programs))
    mesh = device_mesh.make_mesh(cfg)
    run_summary.devices(console, mesh)
    if not claimed:  # rows of a sweep would be removed
      distributed.on_first(run.check_not_of_a_sweep)
    train_step, inputs = _prepared(cfg, run, graph, mesh, console, **options)
    windows = distributed.on_all(lambda: (_stream if cfg.data.stream else training_set)(cfg))
    evaluator = distributed.on_all(lambda: Evaluator(cfg, graph, mesh, run.kernels))

    stop = stack.enter_context(stop_signal.begun(stop))
    how = {"keep": cfg.keep_checkpoints, "say": console.say, "before": run.before_checkpoint}
    checkpoints = stack.enter_context(Checkpoints(run.checkpoints, **how))
    compared = None if allow_config_change else inputs
    state, start, place = _begin(cfg, mesh, checkpoints, run, compared)
    pairs = reference.pairs_of([windows, *evaluator.sources.values()])
    if start:
      distributed.on_all(lambda: reference.load(pairs, run.path))
    elif pairs:
      how = run.path, run.kernels, console.say
      reference.compute(cfg, graph, mesh, state["params"], pairs, *how)
    run.write_config(cfg)
    if distributed.is_first():
      run.on_rows = stack.enter_context(loggers.Loggers(cfg, run.path, start, console.say)).write
    run_summary.start(console, cfg, run, state, windows, start)

    batches = stack.enter_context(
      contextlib.closing(_batches(windows, cfg, mesh, start, place, stop))
    )

    def metadata(step: int) -> dict[str, Any]:
      known: dict[str, Any] = {"data_position": step, "rows": run.row_count()}
      if isinstance(batches, StreamBatches):
        known["stream"] = batches.state
      return known | inputs | {"config": config.to_dict(cfg)}

    # No checkpoint has seen text other than that of the run.
    unchanged = lambda: bindings.check_in_use(inputs["data"], local(cfg.data.folder))
    alone = distributed.count() == 1
    reader = MetricReader(cfg, run, console, list(mesh.devices.flat))
    how = {"should_stop": lambda: stop, "progress": console.progress}
    evaluate = functools.partial(evaluator.of_state, **how)
    when = {"every": cfg.eval_every, "steps": cfg.steps, "at_start": cfg.eval_at_start}
    evaluation = Evaluation(run, evaluate, eval_line, sets=cfg.data.validation, **when)
    saver = Saver(
      checkpoints,
      every=cfg.checkpoint_every,
      start=start,
      metadata=metadata,
      say=console.say,
      check=lambda: distributed.on_all(unchanged),
      failed=None if alone else lambda: reader.votes[1],
    )
    now = Moment(
      start,
      state,
      [run, reader, *called, evaluation, saver, *mirror],
      stop=lambda: stop if alone else reader.votes[0],  # the same value in all processes
      cfg=cfg,
      graph=graph,
      path=run.path,
      evaluations=run.evaluations(),
      metadata=lambda: metadata(now.step),
      say=console.say,
    )
    if start == cfg.steps:
      now.call("started")
    else:
      train_step = train_step or compile_step(cfg, graph, mesh, run.kernels, console)
      tracer = Tracer(run.path, profile, console.say, train_step.as_text)
      stack.callback(tracer.close)
      now.callbacks = [tracer, *now.callbacks]
      votes = None if alone else lambda: (bool(stop), saver.failed)
      loop.train(now, train_step, _feed(batches, cfg, mesh, votes), steps=cfg.steps)

    stopped_by = None
    if now.ended_by is not None:
      console.say(f"ended after step {now.step} by {now.ended_by}")
    elif now.step < cfg.steps or now.stopping:
      stopped_by = stop.name or "a signal to another process"
      run_summary.stopped(console, run, now.step, stopped_by)
    if stopped_by is None:
      run_summary.finished(console, cfg, run, graph, now.state["params"], now.step)
      now.call("finished")
    return Result(now.step, stopped_by, evaluation.rows(now), now.state, now.ended_by)


def _prepared(
  cfg: config.Train,
  run: RunFolder,
  graph: Any,
  mesh: Mesh,
  console: Console,
  *,
  allow_config_change: bool,
  verify_data: bool,
) -> tuple[jax.stages.Compiled | None, dict[str, Any]]:
  """Checks and compiles what it can before it tokenizes the text, which may take hours.

  Rows of prompts or conversations are tokenized, and their lengths checked, before that.

  Returns the step, None if the run has none left, and `bindings.inputs`, in which all processes
  agree.
  """

  def newest_step() -> int:
    metadata = store.newest_metadata(run.checkpoints)
    if not allow_config_change:
      bindings.check_before_preparing(metadata, cfg.data)
    preflight.require(cfg)
    step = metadata.get("data_position")
    return step if type(step) is int else 0

  def tokenized() -> dict[str, Any]:
    found = prepare(cfg.data, progress=True, whole=verify_data, least=preflight.windowed(cfg))
    if of_rows:
      training_set(cfg)  # a row may be longer than a window
    return found

  train_step, sidecars, data = None, None, cfg.data
  step, of_rows = distributed.on_first(newest_step), any(map(data.has_rows, data.train))
  if of_rows:  # prompts and conversations are few, and each of them may be wrong
    sidecars = distributed.on_first(tokenized)
  if step < cfg.steps:
    train_step = compile_step(cfg, graph, mesh, run.kernels, console)
    check_memory(cfg, mesh, train_step, console)
  sidecars = sidecars or distributed.on_first(tokenized)
  inputs = distributed.on_all(lambda: bindings.inputs(cfg.data, sidecars))
  agreement.check(lambda: inputs)
  return train_step, inputs


def _begin(
  cfg: config.Train,
  mesh: Mesh,
  checkpoints: Checkpoints,
  run: RunFolder,
  inputs: dict[str, Any] | None,  # `bindings.inputs`; None skips all comparisons
) -> tuple[State, int, dict[str, int] | None]:
  """Restores the newest state, its step and its position in a stream, or initializes them.

  Removes rows of later steps.
  """
  optional = {"spikes": init_statistics()}  # of a run that has changed `skip_spikes`
  restored = checkpoints.restore(abstract_state(cfg, mesh), optional)
  if restored is None:
    run.keep_rows_until(-1)
    return init_state(cfg, mesh, run.kernels), 0, None
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
  return state, step, metadata.get("stream")


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
  console.say(f"kernels     {dispatch.device.kernels()}")
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


def _batches(
  windows: TokenWindows | Mixture | Stream,
  cfg: config.Train,
  mesh: Mesh,
  start: int,
  place: dict[str, int] | None,
  stop: StopSignal,
) -> TrainBatches | StreamBatches:
  """This process's rows of the batches of steps start + 1, start + 2, ..."""
  size = cfg.global_batch
  rows = distributed.local_rows(device_mesh.batch_sharding(mesh), size)
  if isinstance(windows, Stream):
    alone = distributed.count() == 1  # several processes wait for each other
    return StreamBatches(windows, size, rows, place, stop=lambda: alone and stop)
  options = {"seed": cfg.seed, "order": cfg.data.order, "start": start}
  return train_batches(windows, global_batch=size, rows=rows, **options)


def _feed(
  batches: TrainBatches | StreamBatches,
  cfg: config.Train,
  mesh: Mesh,
  votes: Callable[[], tuple[bool, bool]] | None = None,  # of several processes, in each batch
) -> Generator[Batch]:
  """The batches on their devices."""
  where = device_mesh.batch_sharding(mesh)
  for batch in batches:
    placed = distributed.to_devices(batch, where, cfg.global_batch)
    yield placed | ({"votes": distributed.ballot(mesh, votes())} if votes else {})


def _stream(cfg: config.Train) -> Stream:
  """Opens the source of a config that has `data.stream`."""
  data, (name,) = cfg.data, cfg.data.train
  (key,) = data.fields.get(name, TEXT_FIELDS)
  how = cfg.seq_len, cfg.model.vocab_size, data.boundaries
  options: Any = {"key": key, "seed": cfg.seed, "special_tokens": data.special_tokens}
  return Stream(data.sources[name], tokenizer_of(data), *how, **options)


def training_set(cfg: config.Train) -> TokenWindows | Mixture:
  """Opens the training sets of a config.

  Raises:
    DataError: as `TokenWindows`, or the config has `data.stream`.
  """
  data = cfg.data
  if data.stream:
    raise DataError("data.stream=True is for single runs of `fit`; here token files are needed.")
  how = cfg.seq_len, cfg.model.vocab_size, data.boundaries
  opened = lambda names: TokenWindows(
    [f"{local(data.folder)}/{name}" for name in names],
    *how,
    whole=list(map(data.documents_of_rows, names)),
    packed=data.pack_rows,
  )
  if isinstance(data.train, dict):
    return Mixture({name: opened([name]) for name in data.train}, data.train)
  return opened(data.train)
