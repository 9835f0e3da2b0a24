"""Saving and restoring checkpoints: the only module that uses Orbax.

A checkpoint is a folder named after its step. It has the trees `params`, `ema` if the run averages
them, and `optimizer` (the rest of the state), so that models are read without it; metadata: the
data position (one integer), digests of the training data, and the config; and a digest of every
file (`train.checkpoint.digests`), without which it is not loaded.
"""

import contextlib
import functools
import logging
import os
import re
import sys
import time
import traceback
import typing
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint
from orbax.checkpoint import v1 as ocp

from lnssm_jax.files.printable import PrintableError
from lnssm_jax.pretrained import old_formats
from train.checkpoint import digests, step_folders
from train.checkpoint.step_folders import CheckpointError, DeletedError, Step, newest_step
from train.cluster import distributed
from train.messages import Say, first_line, show, warn
from train.step.state import State

__all__ = [
  "CheckpointError",
  "Checkpoints",
  "StructureError",
  "check_structure",
  "load",
  "newest_metadata",
  "newest_step",
  "split",
]

_MAX_LINES = 20  # of a structure mismatch
_TRIES = 20  # of readers, where each checkpoint is deleted while it is read
_PATIENCE = 60.0  # seconds after which waiting for the disk is reported
# An event loop takes three, and Orbax up to 20 before it waits for the other processes.
_DESCRIPTORS_ALONE, _DESCRIPTORS = 3, 64
_LOOK = 1.0  # seconds between two questions whether the save has failed in another process

# A thread that waits for a folder which cannot be created would keep the process for minutes.
_ASYNC = ocp.options.AsyncOptions(create_directories_asynchronously=False)
_ORBAX = Path(orbax.checkpoint.__file__).parent
_UNAWAITED = "coroutine '(OrbaxLayout|_SaveResponse|async_serialize)"
_AFTERMATH = f"Event loop is closed|'_UnixSelectorEventLoop' .* '_ssock'|{_UNAWAITED}"


class StructureError(PrintableError, ValueError):
  """Checkpoint and model have different parameters; the message lists them by path."""


class Checkpoints:
  """Checkpoints of a run in training, written in the background.

  With several processes, all must make the same calls; process 0 decides and cleans up.

  Args:
    before: called in process 0 before a checkpoint gets its name, to make durable what belongs to
      it; its errors are those of the save.
  """

  def __init__(
    self,
    directory: str | Path,
    *,
    keep: int,
    say: Say = show,
    before: Callable[[], object] = lambda: None,
  ):
    self.directory, self._keep, self._say = Path(directory).absolute(), keep, say
    self._before = before
    self._thread = ThreadPoolExecutor(1, "checkpoint")
    self._pending: Future[None] | None = None
    self._failed = False  # whether the last save has, in this process
    self._abandoned = 0  # saves of which nothing is expected any more
    self._published: int | None = None  # step whose folder has its name, which a sync may not have
    _silence_orbax()
    self._clear()

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, *_) -> None:
    self._thread.shutdown()

  def restore(
    self, abstract: State, optional: Mapping[str, Any] | None = None
  ) -> tuple[State, dict[str, Any]] | None:
    """Restores the newest intact state, sharded like `abstract`, and its metadata.

    Returns None if nothing has been saved. Damaged checkpoints are reported and renamed. An average
    of the parameters that the checkpoint lacks begins with them.

    Args:
      optional: initial values of entries of a state that `abstract`, or the checkpoint, may lack.
        What only the checkpoint has is dropped.

    Raises:
      StructureError: its structure differs from that of `abstract`.
      CheckpointError: all are damaged, or it cannot be read.
    """
    step = distributed.on_first(lambda: step_folders.newest_intact(self.directory, self._say))
    if step is None:
      return None
    loaded, metadata = _read(self.directory / str(step), split(abstract), optional or {})
    if "ema" in abstract and "ema" not in loaded:
      loaded["ema"] = jax.tree.map(lambda x: jnp.array(x, jnp.float32), loaded["params"])
      self._say(f"the average of the parameters begins with those of step {step}")
    distributed.on_first(lambda: step_folders.set_aside_after(self.directory, step, self._say))
    return loaded.pop("optimizer") | loaded, metadata

  def save(self, step: int, state: State, metadata: dict[str, Any]) -> None:
    """Copies the state and writes it in the background; the caller may donate it immediately.

    Waits for a save that is still running. Errors are reported by `failure` or `wait`.

    Args:
      metadata: JSON needed to resume, such as the data position.
    """
    if error := self._ended():
      self._say(str(error))  # not reported yet
    self._failed = False
    self._clear()
    staging = self.directory / f"{step}{step_folders.SAVING}"
    metadata = metadata | {"format": old_formats.FORMAT}
    written, begun = None, False
    try:
      _check_descriptors()
      if not distributed.on_first(lambda: self._is_whole(step, staging)):
        begun = True
        with ocp.Context(async_options=_ASYNC):
          written = ocp.save_checkpointables_async(
            str(staging), split(state), overwrite=True, custom_metadata=metadata
          )
    except Exception as error:
      failure = _not_written(self.directory, step, error)
      if begun and distributed.count() > 1:
        raise failure from error  # the others wait at a barrier of Orbax until this process ends
      self._pending = Future()
      self._pending.set_exception(failure)
      return
    self._pending = self._thread.submit(self._finish, step, staging, written, self._abandoned)

  def failure(self) -> CheckpointError | None:
    """Error of the last save, returned once; None while it runs or if it succeeded."""
    if self._pending is None or not self._pending.done():
      return None
    pending, self._pending = self._pending, None
    error = typing.cast(CheckpointError | None, pending.exception())
    self._failed = error is not None
    return error

  def idle(self) -> bool:
    """Whether no save is running and no failure is unreported."""
    return self._pending is None

  def wait(self) -> None:
    """Waits until everything is on disk.

    Raises:
      CheckpointError: the last save failed.
    """
    if error := self._ended():
      raise error

  def _ended(self) -> BaseException | None:
    """The error of the last save, once it has ended in all processes; says when that takes long.

    If it has failed in one, Orbax lets the others wait for that one for 20 minutes. Here they
    abandon it, and leave its thread alone.
    """
    said = time.monotonic()
    while True:
      error, running = None, False
      if self._pending is not None:
        try:
          error = self._pending.exception(min(_LOOK, _PATIENCE))
        except TimeoutError:
          running = True
      self._failed |= error is not None
      if not distributed.any_of(running):
        self._pending = None
        return error
      if distributed.any_of(self._failed):
        if running:
          self._thread.shutdown(wait=False)
          self._thread = ThreadPoolExecutor(1, "checkpoint")
          self._abandoned += 1
          error = CheckpointError(f"a save to {self.directory} has failed in another process.")
        self._pending = None
        return error
      if time.monotonic() - said >= _PATIENCE:
        said = time.monotonic()
        self._say(
          f"a save to {self.directory} has not ended for another {_PATIENCE:.0f} s; training waits "
          "for the disk"
        )

  def _is_whole(self, step: int, staging: Path) -> bool:
    """Whether only syncs of a save of this step have failed; else its folder can be created.

    Raises:
      OSError: it cannot. The other processes would wait for it.
    """
    if step == self._published and digests.damage(self.directory / str(step)) is None:
      return True
    staging.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # what `_clear` could not remove
      staging.rmdir()
    return False

  def _finish(
    self, step: int, staging: Path, written: ocp.AsyncResponse[None] | None, abandoned: int
  ) -> None:
    """Waits until a save is written, and gives it its name; None: it has that already.

    Nothing is changed once a save has been abandoned, which `abandoned` were when it began.
    """
    try:
      if written is not None:
        written.result()
      if distributed.is_first() and abandoned == self._abandoned:
        if written is not None:
          self._before()
          step_folders.publish(staging, step)
          self._published = step
        step_folders.sync(self.directory)
        step_folders.keep_newest(self.directory, self._keep)
    except Exception as error:
      if abandoned == self._abandoned:
        self._clear()
      raise _not_written(self.directory, step, error) from error

  def _clear(self) -> None:
    """Removes unfinished folders, whose disk space the next save may need."""
    if distributed.is_first():
      step_folders.clear_leftovers(self.directory)


def _check_descriptors() -> None:
  """Raises OSError in all processes if one of them has too few free descriptors to begin a save.

  The others would wait for that process at a barrier of Orbax.
  """
  failure, opened = None, []
  try:
    for _ in range(_DESCRIPTORS_ALONE if distributed.count() == 1 else _DESCRIPTORS):
      opened.append(os.open(os.devnull, os.O_RDONLY))
  except OSError as error:
    failure = error
  for descriptor in opened:
    os.close(descriptor)
  if distributed.any_of(failure is not None):
    raise failure or OSError("another process has too few free descriptors")


def load(
  directory: str | Path, abstract: dict[str, Any], *, step: int | None = None
) -> tuple[dict[str, Any], int, dict[str, Any]]:
  """Loads only the trees of `abstract` from a checkpoint; returns them, its step and metadata.

  Without `step`, loads the newest intact checkpoint and reports newer damaged ones on stderr.

  Raises:
    StructureError: a tree's structure differs from that of `abstract`.
    FileNotFoundError: there is no checkpoint, or none of `step`.
    CheckpointError: all are damaged, or it cannot be read.
  """
  _silence_orbax()
  directory = Path(directory).absolute()
  say = lambda line: warn(f"warning: {line}")
  parts = list(abstract)

  tries = _TRIES if step is None else 1
  while True:
    tries -= 1
    with contextlib.ExitStack() as stack:

      def choose() -> int | None:
        if step is not None:
          return stack.enter_context(step_folders.intact_held(directory, step, parts)).number
        found = stack.enter_context(step_folders.newest_held(directory, say, parts))
        return None if found is None else found.number

      chosen = distributed.on_first(choose)
      if chosen is None:
        raise FileNotFoundError(
          f"no checkpoint in {directory}; train first: lnssm-train fit --config FILE"
        )
      try:
        loaded, metadata = _read(directory / str(chosen), abstract)
        return loaded, chosen, metadata
      except DeletedError:
        if not tries:
          raise


def newest_metadata(directory: str | Path) -> dict[str, Any]:
  """Metadata of the newest step, intact or not, without reading arrays; empty if unreadable.

  For a first comparison; `load` and `Checkpoints.restore` return metadata that was verified.
  """
  step = newest_step(directory)
  _silence_orbax()
  try:
    found = ocp.checkpointables_metadata(str(Path(directory).absolute() / str(step)))
    return dict(typing.cast(dict[str, Any], found.custom_metadata or {}))
  except Exception:  # of any kind, in Orbax; a damaged step is set aside later
    return {}


def split(state: State) -> dict[str, Any]:
  """The trees of a checkpoint."""
  models = {name: state[name] for name in ("params", "ema") if name in state}
  return models | {"optimizer": {name: state[name] for name in state if name not in models}}


def _read(
  path: Path, abstract: dict[str, Any], optional: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Loads the trees of `abstract`; retries once, as network file systems fail now and then."""
  step = Step(path)
  try:
    try:
      return _read_once(path, abstract, optional)
    except StructureError:
      raise
    except Exception:
      return _read_once(path, abstract, optional)
  except StructureError:
    raise
  except Exception as error:
    step.check_there()
    raise CheckpointError(
      f"checkpoint {path} cannot be read ({first_line(error)}), although its files are intact: "
      "it may be from another version of orbax-checkpoint. Move that folder away to resume from "
      "the checkpoint before it."
    ) from error


def _read_once(
  path: Path, abstract: dict[str, Any], optional: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
  """The trees of `abstract`; without `optional` none of them may be missing."""
  found = ocp.checkpointables_metadata(str(path))
  metadata = dict(typing.cast(dict[str, Any], found.custom_metadata or {}))
  is_old, mixer = metadata.pop("format", 1) < old_formats.FORMAT, None
  if is_old and "config" in metadata:
    model = metadata["config"]["model"]
    mixer = model["mixer"]
    metadata["config"] = metadata["config"] | {"model": old_formats.current_model(model)}
  if mixer is not None:
    abstract = old_formats.rename(abstract, old_formats.old_path, mixer)
  if optional is not None and "ema" not in found.metadata:
    abstract = {name: abstract[name] for name in abstract if name != "ema"}
  elif "ema" in abstract and "ema" not in found.metadata:
    raise StructureError(
      f"checkpoint {path} has no average of the parameters: its run had no optimizer.ema_decay."
    )
  saved = {name: found.metadata[name] for name in abstract}
  if None in saved.values():  # Orbax only logs what it cannot read
    raise OSError("the metadata of its arrays is damaged")
  missing, surplus = {}, []
  for name in optional or {}:
    ours, theirs = abstract["optimizer"], saved["optimizer"]
    if name in ours and name not in theirs:
      place = lambda x, like: jax.device_put(x, like.sharding)
      missing[name] = jax.tree.map(place, optional[name], ours[name])
      abstract = abstract | {"optimizer": {key: x for key, x in ours.items() if key != name}}
    elif name in theirs and name not in ours:
      surplus.append(name)
      where = ours["step"].sharding  # replicated
      describe = functools.partial(jax.ShapeDtypeStruct, sharding=where)
      like = jax.tree.map(lambda x, describe=describe: describe(x.shape, x.dtype), theirs[name])
      abstract = abstract | {"optimizer": ours | {name: like}}
  check_structure(path, saved, abstract)
  loaded = ocp.load_checkpointables(str(path), abstract)
  if mixer is not None:
    loaded = old_formats.rename(loaded, old_formats.current_path, mixer)
  if missing or surplus:
    kept = {name: x for name, x in loaded["optimizer"].items() if name not in surplus}
    loaded = loaded | {"optimizer": kept | missing}
  return loaded, metadata


def check_structure(path: str | Path, saved: Any, wanted: Any) -> None:
  """Compares two trees of arrays (or abstract arrays) by path, dtype and shape.

  Raises:
    StructureError: they differ; one line per leaf that is missing, unexpected or different.
  """
  saved, wanted = _leaves(saved), _leaves(wanted)
  lines = [
    f"{name}: missing in the checkpoint, the model needs {wanted[name]}"
    for name in wanted.keys() - saved.keys()
  ]
  lines += [
    f"{name}: {saved[name]} in the checkpoint, not in the model"
    for name in saved.keys() - wanted.keys()
  ]
  lines += [
    f"{name}: {saved[name]} in the checkpoint, the model needs {wanted[name]}"
    for name in wanted.keys() & saved.keys()
    if saved[name] != wanted[name]
  ]
  if lines:
    more = [f"... and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
    lines.sort(key=lambda line: (not line.startswith("params"), line))  # the optimizer repeats them
    raise StructureError(
      f"checkpoint {path} does not match the model of these settings:",
      *(f"  {line}" for line in lines[:_MAX_LINES] + more),
      "Use the settings that it was trained with (config.json of its run folder), or another "
      "run_dir.",
    )


def _leaves(tree: Any) -> dict[str, str]:
  """{"params/head/kernel": "float32[512, 50277]"} for every array of the tree."""
  flat, _ = jax.tree_util.tree_flatten_with_path(tree)
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
  return {name(path): f"{x.dtype}{list(x.shape)}" for path, x in flat}


@functools.cache
def _silence_orbax() -> None:
  """Keeps tracebacks of a failed save or read out of the log: Orbax also raises it.

  What it reads or writes when the first has failed finds its event loop closed, each with a
  traceback, and without free descriptors there is no loop.
  """
  for logger in ("absl", "asyncio"):  # asyncio's are of tasks that it collects later
    logging.getLogger(logger).addFilter(lambda record: not _logged_for_orbax(record))
  warnings.filterwarnings("ignore", _UNAWAITED, RuntimeWarning)
  show = sys.unraisablehook

  def show_others(found: Any) -> None:
    if not re.match(_AFTERMATH, str(found.exc_value)):
      show(found)

  sys.unraisablehook = show_others


def _logged_for_orbax(record: logging.LogRecord) -> bool:
  trace = traceback.walk_tb(record.exc_info[2]) if record.exc_info else ()
  files = (frame.f_code.co_filename for frame, _ in trace)
  return any(Path(file).is_relative_to(_ORBAX) for file in (record.pathname, *files))


def _not_written(directory: Path, step: int, error: Exception) -> CheckpointError:
  return CheckpointError(
    f"the checkpoint of step {step} could not be written to {directory} ({first_line(error)}); "
    "earlier checkpoints are intact. Free disk space or repair the folder."
  )
