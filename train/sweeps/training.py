"""The runs of a sweep, one group after the other: those that are not finished, and not in use."""

import contextlib
import dataclasses
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from lnssm_jax.files.atomic import make_folder
from train import loop, trainer
from train.checkpoint.saver import Saver
from train.checkpoint.store import Checkpoints
from train.cluster import compile_cache, stop_signal
from train.cluster.stop_signal import StopSignal
from train.data import preflight
from train.data.tokenize import prepare as prepare_text
from train.logging.console import duration
from train.loop import DivergedError, Moment
from train.messages import Say, show
from train.runs import bindings, run_folder
from train.runs.rows import Row
from train.runs.run_folder import InUseError, RunFolder, RunFolderError
from train.runs.run_lock import LockedError, RunLock
from train.step.state import initializer
from train.sweeps import tuning
from train.sweeps.groups import Group, group, group_folder, result_row, text_scores, unfinished
from train.sweeps.spec import Run, Sweep
from train.sweeps.text import Text
from train.sweeps.work import Measuring, Scores, Work

SAVE_SECONDS = 120.0  # between two saves of a group: what a killed sweep loses at most

SAY_SECONDS = 30.0  # between two lines of progress

Inputs = Mapping[str, dict[str, Any]]  # `bindings.inputs` of runs that read text, by run folder


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The runs that a sweep needs, their scores, None if not finished, and why it stopped."""

  runs: Sequence[Run]
  scores: Sequence[Scores | None]
  stopped_by: str | None = None
  failures: Sequence[str] = ()

  @property
  def finished(self) -> int:
    """Number of runs that are finished."""
    return sum(known is not None for known in self.scores)


def collect(sweep: Sweep) -> Outcome:
  """The scores that the folders of a sweep have; trains nothing."""
  runs, scores = zip(*tuning.needed(sweep), strict=True)
  return Outcome(list(runs), list(scores))


def ended(sweep: Sweep, stopped_by: str | None = None, failures: Sequence[str] = ()) -> Outcome:
  """`collect`, after training; removes the states of groups once all runs are finished."""
  outcome = dataclasses.replace(collect(sweep), stopped_by=stopped_by, failures=failures)
  if outcome.finished == len(outcome.runs):
    shutil.rmtree(sweep.folder / "unfinished", ignore_errors=True)
  return outcome


def prepare(
  sweep: Sweep, runs: Sequence[Run], say: Say, most: int | None = None
) -> tuple[dict[int, Group], Inputs]:
  """Prepares the text; the groups of `runs` of which some are not finished, by number.

  Raises:
    RunFolderError: a folder has a run with other settings, or the sweep's cannot be created.
    ValueError: settings or data are wrong.
  """
  try:
    make_folder(sweep.folder)
  except OSError as error:
    reason = "it is a file" if sweep.folder.is_file() else error.strerror
    raise RunFolderError(
      f"--out {sweep.folder} cannot be the folder of the sweep: {reason}; name another."
    ) from error
  inputs = _inputs(sweep, say)
  groups = dict(enumerate(group(runs, most), 1))
  left = {number: unfinished(found.runs, inputs) for number, found in groups.items()}
  count, done = len(runs), len(runs) - sum(map(len, left.values()))
  if done:
    say(f"{done} of {count} chosen runs are finished")
  groups = {number: found for number, found in groups.items() if left[number]}
  for found in groups.values():
    jax.eval_shape(
      initializer(found.first.cfg), jax.random.key(0)
    )  # wrong options of a mixer raise here
  return groups, inputs


def train(
  sweep: Sweep, *, most: int | None = None, say: Say = show, stop: StopSignal | None = None
) -> Outcome:
  """Trains the chosen runs of a sweep that are not finished; resumes those that were stopped.

  Other processes may do the same: each group is trained by the first that locks its runs, and the
  others take the next. At the end of the list the groups that were locked are tried once more, as
  their process may have ended, until none of those left can be locked.

  Args:
    most: runs that are trained together; None: all that have one program.
    stop: what ends it; None: signals (`train.cluster.stop_signal`), while it trains.

  Raises:
    RunFolderError: a folder has a run with other settings.
    ValueError: settings or data are wrong; nothing has been trained then.
  """
  runs = tuning.chosen(sweep)
  waiting, inputs = prepare(sweep, runs, say, most)
  seen, last = {run.cfg.run_dir for run in runs}, len(group(runs, most))
  names = {number: f"group {number} of {last}" for number in waiting}
  failures, progress, named = list[str](), True, set[int]()
  programs = compile_cache.folder(compile_cache.IN_RUN, sweep.folder)
  with stop_signal.begun(stop) as stop, compile_cache.at(programs):
    while progress:
      held: dict[int, Group] = {}
      queue, tried = list(waiting.items()), 0
      while queue:
        number, found = queue.pop(0)
        tried += 1
        name = f"{names[number]}: {describe(found.first)}"
        try:
          stopped = stop.name or _train(found, name, sweep.folder, inputs, stop, say)
          if stopped:
            return ended(sweep, stopped, failures)
        except InUseError:
          held[number] = found
          if number not in named:
            say(f"{name}: another process trains it")
          named.add(number)
        except jax.errors.JaxRuntimeError as error:  # such as memory that is exhausted
          failures.append(f"{describe(found.first)}: {str(error).splitlines()[0]}")
          say(f"failed: {failures[-1]}")
        else:
          runs = [run for run in tuning.chosen(sweep) if run.cfg.run_dir not in seen]
          more = list(enumerate(group(runs, most), last + 1))
          names |= {number: "other seeds at the best rate" for number, _ in more}
          seen |= {run.cfg.run_dir for run in runs}
          last += len(more)
          # Those with the program of this group come next, as it is compiled.
          queue = sorted(more, key=lambda x: x[1].first.labels != found.first.labels) + queue
      progress, waiting = len(held) < tried, held
  if waiting:
    left = [f"{names[number]}: {describe(found.first)}" for number, found in waiting.items()]
    say(f"other processes still train {'; '.join(left)}")
  return ended(sweep, None, failures)


def describe(run: Run) -> str:
  """The labels of a run, or its folder."""
  labels = " ".join(f"{name}={value}" for name, value in run.labels.items())
  return labels or Path(run.cfg.run_dir).name


def _inputs(sweep: Sweep, say: Say) -> Inputs:
  """Prepares the text of the chosen runs, in one process at a time; fingerprints of it."""
  runs = [run for run in sweep.chosen if run.task is None]
  if not runs:
    return {}
  known: dict[str, dict[str, Any]] = {}
  with _in_turn(sweep.folder, say):
    for run in runs:
      data = repr(run.cfg.data)
      if data not in known:
        preflight.require(run.cfg)
        known[data] = bindings.inputs(run.cfg.data, prepare_text(run.cfg.data, progress=True))
  return {run.cfg.run_dir: known[repr(run.cfg.data)] for run in runs}


@contextlib.contextmanager
def _in_turn(folder: Path, say: Say) -> Iterator[None]:
  """Context for one process at a time, for which the others wait."""
  lock, said = None, False
  while lock is None:
    try:
      lock = RunLock(folder, say)
    except LockedError:
      if not said:
        say("another process prepares the text; waiting")
      said = True
      time.sleep(0.2)
  try:
    yield
  finally:
    lock.close()


@contextlib.contextmanager
def _claimed(found: Group, inputs: Inputs, say: Say) -> Iterator[dict[str, RunFolder]]:
  """Locks the unfinished runs of a group; their folders, by `run_dir`.

  Raises:
    InUseError: another process has one of them; then none is locked.
  """
  with contextlib.ExitStack() as stack:
    left = unfinished(found.runs, inputs)
    locked = {
      run.cfg.run_dir: stack.enter_context(run_folder.claim(run.cfg, say=say)) for run in left
    }
    # Another process may have finished some before they were locked.
    yield {run.cfg.run_dir: locked[run.cfg.run_dir] for run in unfinished(left, inputs)}


def _train(
  found: Group, name: str, folder: Path, inputs: Inputs, stop: StopSignal, say: Say
) -> str | None:
  """Trains what is left of a group; returns the name of the signal that stopped it.

  Raises:
    InUseError: another process trains it, or has taken it over.
  """
  begin = time.monotonic()
  with _claimed(found, inputs, say) as locked:
    left = Group([run for run in found.runs if run.cfg.run_dir in locked])
    if not left.runs:
      return None
    say(f"{name}, {len(left.runs)} runs" if len(left.runs) > 1 else name)
    parts = list(left.parts)
    while parts:
      part = parts.pop(0)
      try:
        if part.alone:
          stopped = _fit(part.first, locked, inputs, stop, say)
        else:
          stopped = _together(part, folder, locked, inputs, stop, say)
      except jax.errors.JaxRuntimeError as error:
        if len(part.runs) == 1 or not str(error).startswith("RESOURCE_EXHAUSTED"):
          raise
        stopped = None
        parts = [*part.halves, *parts]  # begun once the arrays of the error are free
        say(f"out of memory with {len(part.runs)} runs; now {len(parts[0].runs)} together")
      if stopped:
        return stopped
  say(f"took {duration(time.monotonic() - begin)}")
  return None


def _fit(
  run: Run, locked: Mapping[str, RunFolder], inputs: Inputs, stop: StopSignal, say: Say
) -> str | None:
  """Trains a run with `train.fit`; returns the name of the signal that stopped it."""
  place = run.cfg.run_dir
  try:
    result = trainer.fit(run.cfg, claimed=locked[place], stop=stop)
  except DivergedError as error:
    say(f"diverged: {error}")
    scores: Scores = {f"{name} loss": None for name in run.cfg.data.validation}
    row = result_row(run, run.cfg.steps, scores, inputs.get(place))
  else:
    if result.stopped_by:
      return result.stopped_by
    row = result_row(run, result.step, text_scores(result.validation), inputs.get(place))
  RunFolder(place).append([row])
  return None


def _together(
  found: Group,
  sweep_folder: Path,
  locked: Mapping[str, RunFolder],
  inputs: Inputs,
  stop: StopSignal,
  say: Say,
) -> str | None:
  """Trains the runs of a group as copies; returns the name of the signal that stopped it."""
  place, steps = group_folder(sweep_folder, found), found.first.cfg.steps
  folders = [locked[run.cfg.run_dir] for run in found.runs]
  with contextlib.ExitStack() as stack:
    # A group is continued with the kernels that it began with, and runs of equal programs have the
    # same in all processes: XLA chooses by timing, and rounding decides when recall is learned.
    kernels = sweep_folder / "kernels"
    task = found.first.task
    work: Work = task.work(found.runs, kernels) if task else Text(found, kernels)
    checkpoints = stack.enter_context(Checkpoints(place, keep=1, say=say))
    where = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    state, older = work.copies.state, {}
    if "failures" in state:  # which groups of earlier versions have not counted
      older = {"failures": jnp.zeros_like(state["failures"])}
    restored, start = checkpoints.restore(jax.tree.map(where, state), older), 0
    if restored is not None:
      state, saved_with = restored
      work.restore(saved_with["position"])
      start = saved_with["position"]["step"]
      say(f"resuming after step {start} of {steps}")
    for folder, run in zip(folders, found.runs, strict=True):
      folder.write_config(run.cfg)
      folder.keep_rows_until(start if restored is not None else -1)
    metadata = lambda step: {"position": work.position(step)}
    saver = Saver(checkpoints, every=steps, start=start, metadata=metadata, say=say)
    saving = _Saving(work, steps, folders, saver)
    now = Moment(start, state, [saving], stop=lambda: stop, say=say)
    batches = stack.enter_context(contextlib.closing(work.batches(start)))
    loop.train(now, work.copies.advance, batches, steps=steps)
    if not work.finished:
      say(f"stopped by {stop.name} after step {now.step}; saved. The same command resumes.")
      return stop.name
    say(f"step {now.step}: {_best(work.scores())}")
    for folder, run, scores in zip(folders, found.runs, work.scores(), strict=True):
      folder.append([result_row(run, now.step, scores, inputs.get(run.cfg.run_dir))])
  # A save that was still running has ended; whether it failed does not matter any more.
  shutil.rmtree(place, ignore_errors=True)
  return None


class _Saving(Measuring):
  """Writes the rows of the runs; saves by time, as steps of copies take very different times."""

  def __init__(self, work: Work, steps: int, folders: Sequence[RunFolder], saver: Saver):
    super().__init__(work, steps, SAY_SECONDS)
    self._folders, self._saver, self._saved = folders, saver, time.monotonic()

  def measured(self, now: Moment, rows: list[list[Row]]) -> None:
    for folder in self._folders:
      folder.check()
    for folder, of_run in zip(self._folders, rows, strict=True):
      folder.append(of_run)
    if time.monotonic() - self._saved >= SAVE_SECONDS and not self._work.finished:
      self._saver.save(now.step, now.state)
      self._saved = time.monotonic()

  def ended(self, now: Moment) -> None:
    if not self._work.finished:
      self._saver.ended(now)


def _best(scores: Sequence[Scores]) -> str:
  """The range of the first score over the runs of a group."""
  name = next(iter(scores[0]))
  known = [x for of in scores if (x := of[name]) is not None and math.isfinite(x)]
  return f"{name} {min(known):.4f} to {max(known):.4f}" if known else "all runs diverged"
