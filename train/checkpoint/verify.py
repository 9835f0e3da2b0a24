"""`lnssm-train verify RUN`: checks every byte of a run's checkpoints and token files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lnssm_jax.files.buckets import local
from train.checkpoint import digests, step_folders
from train.data import fingerprints
from train.data.sidecars import read_sidecar

_DAMAGED = "DAMAGED"


def report(directory: str | Path) -> tuple[list[str], bool]:
  """Returns a line per checkpoint in `directory`, oldest first, and whether all are intact.

  Raises:
    FileNotFoundError: there is no checkpoint.
  """
  directory = Path(directory)
  found: dict[int, str] = {}
  # A run in training may delete steps, and save others, meanwhile.
  while new := [step for step in step_folders.steps_in(directory) if step not in found]:
    found |= {step: _state(directory, step) for step in new}
    if any(found[step] for step in new):
      break
  states = {step: state for step, state in sorted(found.items()) if state}
  if not states:
    raise FileNotFoundError(f"no checkpoint in {directory}; use the run_dir of a run of `fit`.")
  width = len(str(max(states)))
  lines = [f"step {step:>{width}}  {state}" for step, state in states.items()]
  return lines, not any(state.startswith(_DAMAGED) for state in states.values())


def _state(directory: Path, number: int) -> str:
  """Describes a checkpoint; empty if its run deleted it."""
  with step_folders.held(directory, number) as step:
    try:
      wrong = step.damage()
      if wrong is None:
        files, size = digests.size(step.path)
        return f"intact, {files} files, {size:,} bytes"
      return f"{_DAMAGED}: {wrong}"
    except (step_folders.DeletedError, OSError, ValueError):
      if step.is_there():
        raise
      return ""


def data_report(data: Mapping[str, Any]) -> tuple[list[str], bool]:
  """Returns a line per set of the stored settings `data`, and whether none is damaged.

  Raises:
    DataError: a file cannot be read.
  """
  lines, whole = [], True
  for name in dict.fromkeys((*data["train"], *data.get("validation", ()))):
    prefix = local(data["folder"]) / name
    here = prefix.with_name(f"{name}.bin").is_file()
    if (sidecar := read_sidecar(prefix)) is None:
      state = "no digest to compare with" if here else "not on this machine"
    else:
      wrong = fingerprints.change(prefix, sidecar, whole=True) if here else f"no {name}.bin"
      whole = whole and wrong is None
      state = "intact" if wrong is None else f"{_DAMAGED}: {wrong}"
    lines.append(f"text {name}  {state}")
  return lines, whole


def adopt(directory: str | Path, step: int) -> str:
  """Recomputes the digests of a checkpoint, trusting its current content; returns a summary.

  For checkpoints that were written without digests or renamed on purpose.

  Raises:
    FileNotFoundError: no such checkpoint.
    CheckpointError: it is or contains a link.
  """
  directory = Path(directory)
  if step not in step_folders.steps_in(directory):
    raise FileNotFoundError(f"no checkpoint of step {step} in {directory}.")
  wrong = digests.damage(directory / str(step))
  if wrong is None:
    return f"step {step} is intact; nothing changed"
  if digests.link_in(directory / str(step)):
    raise step_folders.CheckpointError(
      f"step {step} cannot be trusted: {wrong}. Replace the link by a copy."
    )
  digests.write(directory / str(step), str(step))
  return f"step {step} has new digests, computed from its current content (before: {wrong})"
