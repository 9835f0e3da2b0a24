"""The runs of a sweep, one group after the other, from what is on the disk to what is not."""

import contextlib
import dataclasses
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from train import loop
from train.checkpoint.store import Checkpoints
from train.cluster import compile_cache
from train.cluster.stop_signal import StopSignal
from train.data import preflight
from train.data.tokenize import prepare
from train.logging.console import duration
from train.logging.metric_reader import DivergedError
from train.messages import Say
from train.runs import bindings, run_folder
from train.runs.run_folder import RunFolder
from train.step.state import initializer
from train.sweeps.groups import (
  Group,
  Scores,
  finished,
  group,
  group_folder,
  result_row,
  text_scores,
)
from train.sweeps.spec import Run, Sweep
from train.sweeps.work import Recalling, Text, Work

SAVE_SECONDS = 120.0  # between two saves of a group: what a killed sweep loses at most

SAY_SECONDS = 30.0  # between two lines of progress


@dataclasses.dataclass(frozen=True)
class Outcome:
  """Scores of the runs of a sweep, None for one that is not finished, and why it stopped."""

  scores: Sequence[Scores | None]
  stopped_by: str | None = None
  failures: Sequence[str] = ()


def collect(sweep: Sweep) -> Outcome:
  """The scores that the folders of a sweep have; trains nothing."""
  return Outcome([finished(run, None) for run in sweep.runs])


def train(sweep: Sweep, *, most: int | None = None, say: Say = print) -> Outcome:
  """Trains the chosen runs of a sweep that are not finished; resumes those that were stopped.

  Args:
    most: runs that are trained together; None: all that have one program.

  Raises:
    RunFolderError: a folder has a run with other settings, or another process trains in it.
    ValueError: settings or data are wrong; nothing has been trained then.
  """
  inputs = _inputs(sweep.chosen)
  scores = [finished(run, of) for run, of in zip(sweep.chosen, inputs, strict=True)]
  left = [run for run, known in zip(sweep.chosen, scores, strict=True) if known is None]
  if len(left) < len(scores):
    say(f"{len(scores) - len(left)} of {len(scores)} runs are finished")
  groups, failures = group(left, most), []
  for found in groups:
    jax.eval_shape(
      initializer(found.first.cfg), jax.random.key(0)
    )  # wrong options of a mixer raise here
  of_run = {run.cfg.run_dir: of for run, of in zip(sweep.chosen, inputs, strict=True)}
  sweep.folder.mkdir(parents=True, exist_ok=True)
  programs = compile_cache.folder(compile_cache.IN_RUN, sweep.folder)
  with StopSignal() as stop, compile_cache.at(programs):
    for number, found in enumerate(groups, 1):
      if stop:
        return dataclasses.replace(collect(sweep), stopped_by=stop.name, failures=failures)
      begin = time.monotonic()
      many = f", {len(found.runs)} runs" if len(found.runs) > 1 else ""
      say(f"group {number} of {len(groups)}: {describe(found.first)}{many}")
      try:
        if found.alone:
          stopped = _fit(found, of_run, say)
        else:
          stopped = _together(found, group_folder(sweep.folder, found), of_run, stop, say)
      except jax.errors.JaxRuntimeError as error:  # such as memory that is exhausted
        failures.append(f"{describe(found.first)}: {str(error).splitlines()[0]}")
        say(f"failed: {failures[-1]}\nWith --copies N fewer runs are trained together.")
        continue
      if stopped:
        return dataclasses.replace(collect(sweep), stopped_by=stopped, failures=failures)
      say(f"took {duration(time.monotonic() - begin)}")
  if not failures and len(sweep.chosen) == len(sweep.runs):
    shutil.rmtree(sweep.folder / "unfinished", ignore_errors=True)
  return dataclasses.replace(collect(sweep), failures=failures)


def describe(run: Run) -> str:
  """The labels of a run, or its folder."""
  labels = " ".join(f"{name}={value}" for name, value in run.labels.items())
  return labels or Path(run.cfg.run_dir).name


def _inputs(runs: Sequence[Run]) -> list[dict[str, Any] | None]:
  """Prepares the text of the runs; fingerprints of it, None for a run that reads none."""
  known: dict[str, dict[str, Any]] = {}
  found: list[dict[str, Any] | None] = []
  for run in runs:
    if run.task is not None:
      found.append(None)
      continue
    data = repr(run.cfg.data)
    if data not in known:
      preflight.require(run.cfg)
      known[data] = bindings.inputs(run.cfg.data, prepare(run.cfg.data, progress=True))
    found.append(known[data])
  return found


def _fit(found: Group, inputs: Mapping[str, Any], say: Say) -> str | None:
  """Trains runs one by one, with `train.fit`; returns the name of the signal that stopped it."""
  for run in found.runs:
    folder = RunFolder(run.cfg.run_dir)
    try:
      result = loop.fit(run.cfg)
    except DivergedError as error:
      say(f"diverged: {error}")
      row = result_row(run, run.cfg.steps, _no_scores(run), inputs[run.cfg.run_dir])
    else:
      if result.stopped_by:
        return result.stopped_by
      scores = text_scores(result.validation)
      row = result_row(run, result.step, scores, inputs[run.cfg.run_dir])
    folder.append([row])
  return None


def _together(
  found: Group, place: Path, inputs: Mapping[str, Any], stop: StopSignal, say: Say
) -> str | None:
  """Trains the runs of a group as copies; returns the name of the signal that stopped it."""
  with contextlib.ExitStack() as stack:
    folders = [stack.enter_context(run_folder.claim(run.cfg)) for run in found.runs]
    work: Work = Recalling(found) if found.first.task else Text(found, stack)
    checkpoints = stack.enter_context(Checkpoints(place, keep=1, say=say))
    where = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    restored = checkpoints.restore(jax.tree.map(where, work.copies.state))
    if restored is not None:
      state, metadata = restored
      work.copies.state = state
      work.restore(metadata["position"])
      say(f"resuming after step {work.step} of {found.first.cfg.steps}")
    for folder, run in zip(folders, found.runs, strict=True):
      folder.write_config(run.cfg)
      folder.keep_rows_until(work.step if restored is not None else -1)
    saved = said = time.monotonic()

    def save():
      checkpoints.save(work.step, work.copies.state, {"position": work.position()})

    while not work.finished:
      if stop:
        save()
        checkpoints.wait()
        say(f"stopped by {stop.name} after step {work.step}; saved. The same command resumes.")
        return stop.name
      for folder, rows in zip(folders, work.advance(), strict=True):
        folder.append(rows)
      if time.monotonic() - said >= SAY_SECONDS:
        said = time.monotonic()
        say(f"step {work.step} of at most {found.first.cfg.steps}")
      if time.monotonic() - saved >= SAVE_SECONDS and not work.finished:
        save()
        saved = time.monotonic()
    say(f"step {work.step}: {_best(work.scores())}")
    for folder, run, scores in zip(folders, found.runs, work.scores(), strict=True):
      folder.append([result_row(run, work.step, scores, inputs[run.cfg.run_dir])])
    checkpoints.wait()
  shutil.rmtree(place, ignore_errors=True)
  return None


def _best(scores: Sequence[Scores]) -> str:
  """The range of the first score over the runs of a group."""
  name = next(iter(scores[0]))
  known = [x for of in scores if (x := of[name]) is not None and math.isfinite(x)]
  return f"{name} {min(known):.4f} to {max(known):.4f}" if known else "all runs diverged"


def _no_scores(run: Run) -> Scores:
  return {f"{name} loss": None for name in run.cfg.data.validation}
