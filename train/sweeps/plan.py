"""The plan of a sweep: its runs, their parameters and FLOPs, before anything is trained."""

from collections.abc import Sequence

from train.logging.console import short
from train.step import flops
from train.sweeps import tables, tuning
from train.sweeps.groups import Group, group, unfinished
from train.sweeps.spec import Run, Sweep, rate_of
from train.sweeps.training import describe


def training_flops(run: Run) -> float | None:
  """Model FLOPs of a whole run (`train.step.flops`); None if a mixer has no formula.

  Of a task, logits are computed at its targets only; a run that solves it early has fewer steps.
  """
  cfg = run.cfg
  per_token = flops.model_flops_per_token(cfg.model, cfg.seq_len)
  if per_token is None:
    return None
  per_row = per_token * cfg.seq_len
  if run.task is not None:
    per_row -= 2 * cfg.model.dim * cfg.model.vocab_size * (cfg.seq_len - run.task.targets(cfg))
  return flops.TRAINING_FACTOR * per_row * cfg.global_batch * cfg.steps


def lines(sweep: Sweep, most: int | None = None) -> list[str]:
  """A line per group of runs, and totals; reads folders, but no text."""
  chosen = tuning.chosen(sweep, planned=True)
  left = [unfinished(found.runs, {}) for found in group(chosen, most)]
  groups = [Group(runs) for runs in left if runs]
  text, total, count = [], 0.0, sum(map(len, left))
  for found in groups:
    run, cost = found.first, training_flops(found.first)
    total += len(found.runs) * (cost or 0)
    tokens = run.cfg.steps * run.cfg.global_batch * run.cfg.seq_len
    text.append(
      f"{describe(run)}: {tables.parameters(run.cfg.model):,} parameters, {len(found.runs)} runs"
      f" ({_range('learning rates', [f'{rate_of(x):g}' for x in found.runs])},"
      f" {_range('seeds', [str(x.cfg.seed) for x in found.runs])}),"
      f" {run.cfg.steps:,} steps, {short(tokens)} tokens each,"
      f" {'no formula for its FLOPs' if cost is None else f'{len(found.runs) * cost:.3g} FLOPs'}"
    )
  return [
    *text,
    f"{count} runs in {len(groups)} groups, {len(chosen) - count} finished,"
    f" {total:.3g} model FLOPs;"
    f" {total / 1e14 / 60:.3g} minutes at 100 TFLOP/s",
  ]


def _range(name: str, values: Sequence[str]) -> str:
  return f"{name} {' '.join(dict.fromkeys(values))}"
