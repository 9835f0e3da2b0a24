"""Groups of runs that are trained together, and which runs are finished."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lnssm_jax.files.checked_json import check_shape
from lnssm_jax.files.reading import digest_of
from train import config
from train.checkpoint import store
from train.config.changes import differences, is_free
from train.runs import bindings
from train.runs.rows import Row
from train.runs.run_folder import RunFolder, RunFolderError
from train.step.copies import without_run
from train.sweeps.spec import Run, primary, rate_of
from train.sweeps.work import Scores

# A run is itself whatever these are; others that a resumed run may change affect its rounding.
_LOCAL = ("watch", "compile_cache", "log_every", "eval_every", "checkpoint_every")


@dataclasses.dataclass(frozen=True)
class Group:
  """Runs that differ in seed, learning rate and folder only: copies of one program."""

  runs: Sequence[Run]

  @property
  def first(self) -> Run:
    """A run that stands for all."""
    return self.runs[0]

  @property
  def pairs(self) -> list[tuple[int, float]]:
    """(seed, learning rate) of each run."""
    return [(run.cfg.seed, rate_of(run)) for run in self.runs]

  @property
  def alone(self) -> bool:
    """Whether `train.fit` trains its runs, one by one.

    A single language model, several devices, averages of parameters, and callbacks.
    """
    cfg = self.first.cfg
    is_spread = any(size > 1 for size in dataclasses.asdict(cfg.mesh).values())
    single = self.first.task is None and len(self.runs) == 1
    return single or is_spread or cfg.optimizer.ema_decay is not None or bool(cfg.callbacks)

  @property
  def parts(self) -> list["Group"]:
    """Each stopped run of `train.fit` alone, which that continues, and the others together."""
    of_fit, others = list[Run](), list[Run]()
    for run in self.runs:
      step = store.newest_step(RunFolder(run.cfg.run_dir).checkpoints)
      (others if step is None else of_fit).append(run)
    return [Group(runs) for runs in (*([run] for run in of_fit), others) if runs]

  @property
  def halves(self) -> tuple["Group", "Group"]:
    """Its first runs and the others, at most one fewer."""
    middle = -(-len(self.runs) // 2)
    return Group(self.runs[:middle]), Group(self.runs[middle:])

  @property
  def key(self) -> str:
    """Digest of all settings of its runs."""
    runs = [{"program": _program(run), "seed and rate": pair} for run, pair in zip(
      self.runs, self.pairs, strict=True)]  # fmt: skip
    return digest_of({"runs": runs})[:16]


def group(runs: Sequence[Run], most: int | None = None) -> list[Group]:
  """Groups of runs with the same program, in the order of their first runs.

  They depend on the list alone, so that processes agree on them whatever is finished when each of
  them starts. Runs that only `train.fit` can train are groups of one.

  Args:
    most: runs of a group, which bounds the memory; None: all.
  """
  found: dict[str, list[Run]] = {}
  for run in runs:
    found.setdefault(digest_of(_program(run)), []).append(run)
  groups: list[Group] = []
  for same in found.values():
    size = 1 if Group(same).alone else most or len(same)
    groups += [Group(same[i : i + size]) for i in range(0, len(same), size)]
  return groups


def unfinished(runs: Sequence[Run], inputs: Mapping[str, Any]) -> list[Run]:
  """Those without scores in their folders (`finished`); `inputs` by run folder."""
  return [run for run in runs if finished(run, inputs.get(run.cfg.run_dir)) is None]


def finished(run: Run, inputs: Mapping[str, Any] | None) -> Scores | None:
  """The scores of a run that its folder has, with the same settings, task and text; else None.

  Args:
    inputs: `bindings.inputs` of its data, or None: not compared.

  Raises:
    RunFolderError: the folder has a run with other settings, on another task, or on other text.
  """
  folder = RunFolder(run.cfg.run_dir)
  if not folder.config_file.exists() or not (rows := folder.read_rows()):
    return None
  changed = differences(folder.load_config(), run.cfg)
  lines = [line for name, line in changed.items() if name == "steps" or not is_free(name)]
  results = [_checked_result(folder, run, row) for row in rows if row["kind"] == "result"]
  if results and results[-1]["task"] != task_settings(run):
    lines.append(f"task: the folder's run has {results[-1]['task']}, this one {task_settings(run)}")
  if results and inputs and (before := results[-1].get("inputs")):
    names = bindings.changed_sets(before["data"], inputs["data"])
    lines += [f"text of {name}: not that of the folder's run" for name in names]
  if lines:
    raise RunFolderError(
      f"{folder.path} has a run with other settings:",
      *(f"  {line}" for line in lines),
      "Restore them, give the sweep another folder by --out, or remove that one.",
    )
  if results:
    return results[-1]["scores"]
  if run.task is not None:
    return None
  return text_scores(folder.evaluation(run.cfg.steps, run.cfg.data.validation)) or None


# Of a row with the kind "result"; older ones have no inputs.
_RESULT = {
  "scores": {str: (float, None)},
  "task": ({}, None),
  "inputs?": {"data": {str: Any}},
}


def _checked_result(folder: RunFolder, run: Run, row: Row) -> Row:
  """`row`; RunFolderError unless it is a result of a run of this kind."""
  try:
    check_shape(row, _RESULT, "the result")
    check_shape(row["scores"], {primary(run)[0]: (float, None)}, "scores of the result")
  except ValueError as error:
    raise RunFolderError(
      f"{folder.metrics_file} is damaged: {error}. Remove the folder, and the sweep trains the run"
      " again."
    ) from None
  return row


def result_row(run: Run, step: int, scores: Scores, inputs: Mapping[str, Any] | None) -> Row:
  """The last row of a finished run in metrics.jsonl; a score that is not finite is None."""
  known = {name: x if x is not None and math.isfinite(x) else None for name, x in scores.items()}
  row = {"kind": "result", "step": step, "scores": known, "task": task_settings(run)}
  return row | ({"inputs": dict(inputs)} if inputs else {})


def text_scores(rows: Sequence[Row]) -> Scores:
  """Scores of the evaluation of a language model, by set."""
  scores = {f"{row['set']} loss": row["val_loss"] for row in rows}
  bits = {f"{row['set']} bits per byte": row["bits_per_byte"] for row in rows}
  return scores | {name: x for name, x in bits.items() if x is not None}


def task_settings(run: Run) -> dict[str, Any] | None:
  """The task of a run as JSON; None for a language model."""
  return None if run.task is None else config.to_dict(run.task)


def group_folder(folder: Path, found: Group) -> Path:
  """Where an unfinished group has its state."""
  return folder / "unfinished" / found.key


def _program(run: Run) -> dict[str, Any]:
  """The settings that runs of one group have in common."""
  values = config.to_dict(without_run(run.cfg))
  shared = {name: x for name, x in values.items() if name not in _LOCAL}
  return shared | {"task": task_settings(run)}
