"""Checkpoints of a run: the only file that knows Orbax.

A checkpoint is a folder named after its step. It holds two trees, `params` and `optimizer` (optax
state and step count), so that a reader of the model need not read the optimizer; and, as metadata,
the position in the data (one integer), what the data was, and the settings of the run.
"""

import typing
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from train.step import State

_MARKS = ("_CHECKPOINT_METADATA", "params/_METADATA", "optimizer/_METADATA")
_SHOWN = 20  # lines of a structure mismatch


class CheckpointError(RuntimeError):
  """A checkpoint could not be written or read; the message says which, and what to do."""

  exit_code = 1  # of the command line


class StructureError(ValueError):
  """The checkpoint holds other parameters than the model; the message lists them by path."""


class Checkpoints:
  """The checkpoints of one run that is being trained; saves in the background."""

  def __init__(self, directory: str | Path, *, keep: int):
    self.directory = Path(directory).absolute()
    for stray in _strays(self.directory):
      # Orbax takes any folder with a number for a checkpoint, an empty one too.
      stray.rename(_free_name(stray))
    newest: Any = ocp.training.preservation_policies.LatestN(keep)
    self._orbax = ocp.training.Checkpointer(
      str(self.directory),
      preservation_policy=newest,
      cleanup_tmp_directories=True,
    )

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, *_) -> None:
    self._orbax.close()

  def latest(self) -> int | None:
    """The newest complete step, or None."""
    return newest_step(self.directory)

  def save(self, step: int, state: State, metadata: dict[str, Any]) -> None:
    """Copies the state and writes it in the background; the caller may donate it at once.

    Args:
      metadata: what else is needed to go on, such as the position in the data; JSON.

    Raises:
      CheckpointError: this save, or the one before that was still running, failed.
    """
    trees = {"params": state["params"], "optimizer": {k: state[k] for k in ("opt_state", "step")}}
    try:
      self._orbax.save_checkpointables_async(step, trees, force=True, custom_metadata=metadata)
    except Exception as error:
      raise _not_written(self.directory, error) from error

  def wait(self) -> None:
    """Returns when everything is on disk.

    Raises:
      CheckpointError: the last save failed.
    """
    try:
      self._orbax.wait()
    except Exception as error:
      raise _not_written(self.directory, error) from error

  def restore(self, abstract: State) -> tuple[State, dict[str, Any]]:
    """The newest state, placed as `abstract` says, and the metadata saved with it.

    Raises:
      StructureError: it does not have the structure of `abstract`.
      CheckpointError: it cannot be read.
    """
    optimizer = {k: abstract[k] for k in ("opt_state", "step")}
    trees = {"params": abstract["params"], "optimizer": optimizer}
    loaded, _, metadata = load(self.directory, trees)
    return {"params": loaded["params"], **loaded["optimizer"]}, metadata


def load(
  directory: str | Path, abstract: dict[str, Any]
) -> tuple[dict[str, Any], int, dict[str, Any]]:
  """The trees of `abstract` from the newest checkpoint, its step, and the metadata beside it.

  Raises:
    StructureError: a tree does not have the structure of `abstract`.
    FileNotFoundError: there is no checkpoint.
    CheckpointError: it cannot be read.
  """
  directory = Path(directory).absolute()
  step = newest_step(directory)
  if step is None:
    raise FileNotFoundError(
      f"no checkpoint in {directory}; train first with: python -m train fit --config FILE"
    )
  path = directory / str(step)
  try:
    found = ocp.checkpointables_metadata(str(path))
    saved = {name: found.metadata[name] for name in abstract}
    if None in saved.values():  # Orbax only logs what it could not read
      raise OSError("the description of its arrays is damaged")
    check_structure(path, saved, abstract)
    loaded = ocp.load_checkpointables(str(path), abstract)
    return loaded, step, typing.cast(dict[str, Any], found.custom_metadata)
  except StructureError:
    raise
  except Exception as error:
    raise CheckpointError(
      f"checkpoint {path} cannot be read ({_first_line(error)}); move that folder away to go on "
      "from the one before it."
    ) from error


def newest_step(directory: str | Path) -> int | None:
  """The newest complete step in `directory`, or None; other folders do not count."""
  steps = [int(path.name) for path in _numbered(Path(directory)) if _is_complete(path)]
  return max(steps, default=None)


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


def _numbered(directory: Path) -> list[Path]:
  if not directory.is_dir():
    return []
  return [path for path in directory.iterdir() if path.name.isdecimal() and path.is_dir()]


def _is_complete(path: Path) -> bool:
  return all((path / mark).is_file() for mark in _MARKS)


def _strays(directory: Path) -> list[Path]:
  return [path for path in _numbered(directory) if not _is_complete(path)]


def _free_name(path: Path) -> Path:
  """A name beside `path` that Orbax does not take for a step: "15.incomplete"."""
  free, count = path.with_name(f"{path.name}.incomplete"), 1
  while free.exists():
    free, count = path.with_name(f"{path.name}.incomplete.{count}"), count + 1
  return free


def _not_written(directory: Path, error: Exception) -> CheckpointError:
  return CheckpointError(
    f"a checkpoint could not be written to {directory} ({_first_line(error)}); the ones before it "
    "are intact. Make room or mend the folder, then run the same command to go on."
  )


def _first_line(error: Exception) -> str:
  text = str(error).strip().split("\n")[0]
  return f"{type(error).__name__}: {text[:200]}"
