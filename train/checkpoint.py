"""Checkpoints of a run: the only file that knows Orbax.

A checkpoint is a folder named after its step. It holds two trees, `params` and `optimizer` (all
else of the state), so that a reader of the model need not read the optimizer; as metadata, the
position in the data (one integer), what the data was, and the settings of the run; and a digest of
every file (`train.digests`), without which it does not count.
"""

import sys
import typing
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from train import distributed, step_folders
from train.step import State
from train.step_folders import CheckpointError, Say, newest_step

__all__ = [
  "CheckpointError",
  "Checkpoints",
  "StructureError",
  "check_structure",
  "load",
  "newest_step",
]

_SHOWN = 20  # lines of a structure mismatch


class StructureError(ValueError):
  """The checkpoint holds other parameters than the model; the message lists them by path."""


class Checkpoints:
  """The checkpoints of one run that is being trained; saves in the background.

  With several processes, all of them make the same calls. The first one decides and tidies up.
  """

  def __init__(self, directory: str | Path, *, keep: int, say: Say = print):
    self.directory, self._keep, self._say = Path(directory).absolute(), keep, say
    self._thread = ThreadPoolExecutor(1, "checkpoint")
    self._pending: Future[None] | None = None
    self._clear()

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, *_) -> None:
    self._thread.shutdown()

  def restore(self, abstract: State) -> tuple[State, dict[str, Any]] | None:
    """The newest intact state, placed as `abstract` says, and the metadata saved with it.

    None when nothing has been saved. Damaged checkpoints are named and put aside.

    Raises:
      StructureError: it does not have the structure of `abstract`.
      CheckpointError: all are damaged, or it cannot be read.
    """
    step = distributed.on_first(lambda: step_folders.newest_intact(self.directory, self._say))
    if step is None:
      return None
    loaded, metadata = _read(self.directory / str(step), _split(abstract))
    distributed.on_first(lambda: step_folders.put_aside_after(self.directory, step, self._say))
    return {"params": loaded["params"], **loaded["optimizer"]}, metadata

  def save(self, step: int, state: State, metadata: dict[str, Any]) -> None:
    """Copies the state and writes it in the background; the caller may donate it at once.

    A save that is still running is waited for. What goes wrong is told by `failure` or `wait`.

    Args:
      metadata: what else is needed to go on, such as the position in the data; JSON.
    """
    if self._pending and (error := self._pending.exception()):
      self._say(str(error))  # nobody has asked; it must not get lost
    self._clear()
    staging = self.directory / f"{step}{step_folders.SAVING}"
    try:
      written = ocp.save_checkpointables_async(
        str(staging), _split(state), overwrite=True, custom_metadata=metadata
      )
    except Exception as error:
      self._pending = Future()
      self._pending.set_exception(_not_written(self.directory, step, error))
      return
    self._pending = self._thread.submit(self._finish, step, staging, written)

  def failure(self) -> CheckpointError | None:
    """Why the last save failed, told once; None while it runs and when it has succeeded."""
    if self._pending is None or not self._pending.done():
      return None
    pending, self._pending = self._pending, None
    return typing.cast(CheckpointError | None, pending.exception())

  def idle(self) -> bool:
    """Whether no save is running, nor a failure untold."""
    return self._pending is None

  def wait(self) -> None:
    """Returns when everything is on disk.

    Raises:
      CheckpointError: the last save failed.
    """
    pending, self._pending = self._pending, None
    if pending:
      pending.result()

  def _finish(self, step: int, staging: Path, written: Any) -> None:
    try:
      written.result()
      if distributed.is_first():
        step_folders.publish(staging, step)
        step_folders.keep_newest(self.directory, self._keep)
    except Exception as error:
      self._clear()
      raise _not_written(self.directory, step, error) from error

  def _clear(self) -> None:
    """Removes what was not finished: what it holds may be the room that the next one needs."""
    if distributed.is_first():
      step_folders.clear_leftovers(self.directory)


def load(
  directory: str | Path, abstract: dict[str, Any], *, step: int | None = None
) -> tuple[dict[str, Any], int, dict[str, Any]]:
  """The trees of `abstract` from a checkpoint, its step, and the metadata. Reads no other tree.

  Without `step`, from the newest that is intact; damaged ones that are newer are named on stderr.

  Raises:
    StructureError: a tree does not have the structure of `abstract`.
    FileNotFoundError: there is no checkpoint, or none of `step`.
    CheckpointError: all are damaged, or it cannot be read.
  """
  directory = Path(directory).absolute()
  warn = lambda line: print(f"warning: {line}", file=sys.stderr)
  parts = list(abstract)

  def choose() -> int | None:
    if step is None:
      return step_folders.newest_intact(directory, warn, parts)
    return step_folders.intact(directory, step, parts)

  step = distributed.on_first(choose)
  if step is None:
    raise FileNotFoundError(
      f"no checkpoint in {directory}; train first with: python -m train fit --config FILE"
    )
  loaded, metadata = _read(directory / str(step), abstract)
  return loaded, step, metadata


def _split(state: State) -> dict[str, Any]:
  """The two trees of a checkpoint."""
  return {
    "params": state["params"],
    "optimizer": {name: state[name] for name in state if name != "params"},
  }


def _read(path: Path, abstract: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
  try:
    found = ocp.checkpointables_metadata(str(path))
    saved = {name: found.metadata[name] for name in abstract}
    if None in saved.values():  # Orbax only logs what it could not read
      raise OSError("the description of its arrays is damaged")
    check_structure(path, saved, abstract)
    loaded = ocp.load_checkpointables(str(path), abstract)
    return loaded, typing.cast(dict[str, Any], found.custom_metadata or {})
  except StructureError:
    raise
  except Exception as error:
    raise CheckpointError(
      f"checkpoint {path} cannot be read ({_first_line(error)}), though its files are as they were "
      "written: another version of orbax-checkpoint may have made it. Move that folder away to go "
      "on from the one before it."
    ) from error


def check_structure(path: str | Path, saved: Any, wanted: Any) -> None:
  """Compares two trees of arrays or of their descriptions, path by path.

  Raises:
    StructureError: they differ; one line for each leaf that is missing, unexpected or different.
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
    more = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    lines.sort(key=lambda line: (not line.startswith("params"), line))  # the optimizer's repeat it
    listing = "\n  ".join(lines[:_SHOWN] + more)
    raise StructureError(
      f"checkpoint {path} has another structure than the model of these settings:\n  {listing}\n"
      "Use the settings that it was trained with (config.json of its run folder), or another "
      "run_dir."
    )


def _leaves(tree: Any) -> dict[str, str]:
  """{"params/head/kernel": "float32[512, 50277]"} for every array of the tree."""
  flat, _ = jax.tree_util.tree_flatten_with_path(tree)
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
  return {name(path): f"{x.dtype}{list(x.shape)}" for path, x in flat}


def _not_written(directory: Path, step: int, error: Exception) -> CheckpointError:
  return CheckpointError(
    f"the checkpoint of step {step} could not be written to {directory} ({_first_line(error)}); "
    "the ones before it are intact. Make room or mend the folder."
  )


def _first_line(error: Exception) -> str:
  text = str(error).strip().split("\n")[0]
  return f"{type(error).__name__}: {text[:200]}"
