"""Which runs a sweep needs if one seed chooses the learning rate at which the others train."""

from train.sweeps.groups import finished
from train.sweeps.spec import Run, Sweep, primary, rate_of
from train.sweeps.work import Scores


def needed(sweep: Sweep, *, planned: bool = False) -> list[tuple[Run, Scores | None]]:
  """The runs that a sweep needs, as far as is known, and the scores of those that are finished.

  All of them without a `tuning_seed`. Else those of that seed, and once all with the same labels
  are finished, the other seeds at the rate that has the best score.

  Args:
    planned: whether the other seeds are there before their rate is known, at the first rate.
  """
  known = [(run, finished(run, None)) for run in sweep.runs]
  if sweep.tuning_seed is None:
    return known
  name, sign = primary(sweep.runs[0])
  tried: dict[tuple, list[tuple[float, Scores | None]]] = {}
  for run, scores in known:
    if run.cfg.seed == sweep.tuning_seed:
      tried.setdefault(_labels(run), []).append((rate_of(run), scores))
  best: dict[tuple, float] = {}
  for labels, of_rates in tried.items():
    compared = [
      (sign * score, rate)
      for rate, scores in of_rates
      if scores is not None and (score := scores.get(name)) is not None
    ]
    if compared and all(scores is not None for _, scores in of_rates):
      best[labels] = max(compared)[1]
    elif planned:
      best[labels] = of_rates[0][0]
  return [
    (run, scores)
    for run, scores in known
    if run.cfg.seed == sweep.tuning_seed or best.get(_labels(run)) == rate_of(run)
  ]


def chosen(sweep: Sweep, *, planned: bool = False) -> list[Run]:
  """Those of `needed` that are chosen to be trained."""
  if sweep.tuning_seed is None:
    return list(sweep.chosen)
  places = {run.cfg.run_dir for run, _ in needed(sweep, planned=planned)}
  return [run for run in sweep.chosen if run.cfg.run_dir in places]


def _labels(run: Run) -> tuple:
  return tuple(run.labels.items())
