"""`python -m train verify RUN` reads every byte of the checkpoints and says which are whole."""

from pathlib import Path

from train import digests, step_folders
from train.run_folder import RunFolder


def report(path: str | Path) -> tuple[list[str], bool]:
  """A line for each checkpoint of a run, oldest first, and whether all of them are intact.

  Raises:
    FileNotFoundError: it has no checkpoint.
  """
  directory = RunFolder(path).checkpoints
  steps = step_folders.steps_in(directory)
  if not steps:
    raise FileNotFoundError(f"no checkpoint in {directory}; give the run_dir of a run of `fit`.")
  lines, whole = [], True
  for step in steps:
    folder = directory / str(step)
    wrong = digests.damage(folder)
    whole = whole and wrong is None
    if wrong is None:
      files, size = digests.size(folder)
      lines.append(f"step {step:>{len(str(steps[-1]))}}  intact, {files} files, {size:,} bytes")
    else:
      lines.append(f"step {step:>{len(str(steps[-1]))}}  DAMAGED: {wrong}")
  return lines, whole


def adopt(path: str | Path, step: int) -> str:
  """Makes new digests for a checkpoint as it is now; returns what was done.

  For one that was made without digests, or renamed on purpose. It is trusted as it is.

  Raises:
    FileNotFoundError: there is no such checkpoint.
    CheckpointError: it is, or holds, a link.
  """
  directory = RunFolder(path).checkpoints
  if step not in step_folders.steps_in(directory):
    raise FileNotFoundError(f"no checkpoint of step {step} in {directory}.")
  wrong = digests.damage(directory / str(step))
  if wrong is None:
    return f"step {step} is intact; nothing was changed"
  if digests.link_in(directory / str(step)):
    raise step_folders.CheckpointError(
      f"step {step} cannot be trusted: {wrong}. Put a copy in the place of the link."
    )
  digests.write(directory / str(step), str(step))
  return f"step {step} has new digests and is trusted as it is (before: {wrong})"
