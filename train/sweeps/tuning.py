"""Which runs a sweep needs if one seed chooses the learning rate at which the others train."""

from collections.abc import Sequence

from train.sweeps.groups import finished
from train.sweeps.spec import Run, Sweep, primary, rate_of
from train.sweeps.work import Scores


def needed(sweep: Sweep, *, planned: bool = False) -> list[tuple[Run, Scores | None]]:
  """The runs that a sweep needs, as far as is known, and the scores of those that are finished.

  All of them without a `tuning_seed`. Else those of that seed, and once all with the same labels
  are finished, the other seeds at the rate that has the best score. With `first_rates` that seed
  has these rates alone, and the next one as well while the best is the least or largest tried.

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
    of_rates[:] = _until_inside(of_rates, sweep.first_rates, name, sign)
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
    if best.get(_labels(run)) == rate_of(run)
    or (
      run.cfg.seed == sweep.tuning_seed
      and rate_of(run) in [rate for rate, _ in tried[_labels(run)]]
    )
  ]


def _until_inside(
  of_rates: list[tuple[float, Scores | None]], first: Sequence[float] | None, name: str, sign: int
) -> list[tuple[float, Scores | None]]:
  """Rates of the tuning seed: the first, and more at an edge that has the best score."""
  of_rates = sorted(of_rates, key=lambda x: x[0])
  if first is None:
    return of_rates
  places = [i for i, (rate, _) in enumerate(of_rates) if rate in first]
  low, high = min(places), max(places)
  while all(scores is not None for _, scores in of_rates[low : high + 1]):
    known = [
      (sign * score, i)
      for i in range(low, high + 1)
      if (score := (of_rates[i][1] or {}).get(name)) is not None
    ]
    best = max(known)[1] if known else None
    if best == low and low > 0:
      low -= 1
    elif best == high and high + 1 < len(of_rates):
      high += 1
    else:
      break
  return of_rates[low : high + 1]


def chosen(sweep: Sweep, *, planned: bool = False) -> list[Run]:
  """Those of `needed` that are chosen to be trained."""
  if sweep.tuning_seed is None:
    return list(sweep.chosen)
  places = {run.cfg.run_dir for run, _ in needed(sweep, planned=planned)}
  return [run for run in sweep.chosen if run.cfg.run_dir in places]


def _labels(run: Run) -> tuple:
  return tuple(run.labels.items())
