"""Every row of experiments/claims.md names a test, a command, a config or a page that exists."""

import math
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from experiments import command as experiments
from experiments import verdicts
from train.cli import main as train
from train.scoring.commands import TASKS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "experiments/claims.md").read_text()
PARSERS = {"train": train._parser, "experiments": experiments.parser}
ROWS = re.findall(r"^\| (?!claim \|).*$", PAGE, re.M)


def test_tests_and_files_of_the_claims_exist():
  found = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
  assert len(found) > 20
  for file, name in found:
    assert f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"
  files = re.findall(r"((?:experiments/)?configs/[\w/]+\.py|experiments/sweeps/\w+\.py)", PAGE)
  files += [f"experiments/{page}" for page in re.findall(r"\]\(([\w/.]+\.md)", PAGE)]
  assert [file for file in files if not (ROOT / file).is_file()] == []
  programs = {"experiments.long_context", "experiments.sparse_training"}
  programs |= {"benchmarks.model_step", "benchmarks.sparse_state"}
  assert set(re.findall(r"-m ((?:benchmarks|experiments)\.\w+)", PAGE)) == programs


def test_commands_of_the_claims_are_complete():
  found = re.findall(r"`python -m (train|experiments) ([^`]+)`", PAGE)
  assert len(found) > 10
  for program, command in found:
    PARSERS[program]().parse_args(shlex.split(command))  # exits with 2 if an argument is missing


def test_each_experiment_has_a_command_or_a_reason():
  page = (ROOT / "experiments/README.md").read_text()
  rows = re.findall(r"^\| (E\d+) \| ([^|]+) \| (.+) \|$", page, re.M)
  assert [name for name, _, _ in rows] == [f"E{number}" for number in range(1, 26)]
  known = {"experiments": {task.name for task in experiments.TASKS} | {"classify"}}
  known["train"] = {f"task {task.name}" for task in TASKS} | {"fit", "sweep", "import"}
  for name, _, how in rows:
    words = re.findall(r"`(?:python -m )?(train|experiments|benchmarks)[. ]((?:task )?[\w-]+)", how)
    assert words or re.match(r"impossible here: \w+", how), name
    for program, command in words:
      assert command in known.get(program, (command,)), name
    files = re.findall(r"(?:experiments/)?configs/[\w/]+\.py|experiments/sweeps/\w+\.py", how)
    files += [f"benchmarks/{module}.py" for module in re.findall(r"benchmarks\.(\w+)", how)]
    assert [file for file in files if not (ROOT / file).exists()] == [], name


def test_tables_and_figures_of_the_papers_are_counted():
  page = (ROOT / "experiments/items.md").read_text()
  rows = re.findall(r"^\| (?:figure|table) \d+ \| [^|]+ \| ([^|]+) \|(.*)$", page, re.M)
  assert len(rows) == 49
  for kind in ("run", "impossible", "not run"):
    of = [here for printed, here in rows if printed.strip("*").startswith(kind)]
    smaller = sum(here.startswith((" smaller", " altered")) for here in of)
    assert re.search(rf"^\| {kind} \| {len(of)} \| {smaller or ''} ?\|$", page, re.M), kind
  sweeps = re.findall(r"`((?:lm|mqar)_\w+)`", page)
  assert [name for name in sweeps if not (ROOT / f"experiments/sweeps/{name}.py").exists()] == []


def test_each_claim_has_evidence_and_one_kind_of_verdict():
  for row in ROWS:
    claim, evidence, verdict = (cell.strip() for cell in row.strip("|").split(" | "))
    assert claim and ("`" in evidence or "](" in evidence or evidence == "the same"), row
    assert re.match(r"\*\*(holds|does not hold|in part|undecided|not run|not here)\*\*", verdict), (
      row
    )
    if verdict.startswith(("**holds", "**does not", "**in part", "**undecided")):
      assert "::" in evidence or ".md)" in evidence, f"a verdict without a test or numbers: {row}"


def test_intervals_of_claims_and_pages_are_computed_from_the_results():
  compared = [x.text for claim in verdicts.COMPARISONS.values() for x in claim]
  pages = [PAGE, *(file.read_text() for file in verdicts.RESULTS.glob("*.md"))]
  text = " ".join(" ".join(pages).split())
  assert [x for x in compared if x not in text] == []
  quoted = re.findall(r"(?:[+-][\d.]+|\d+ of \d+) \[[^]]+\]", text)
  assert len(quoted) > 150 and set(quoted) <= set(compared)


def test_differences_have_the_intervals_of_their_runs():
  """The values of the runs come back from their summaries, and the tests are the textbook's."""
  rng = np.random.default_rng(0)
  for count in (2, 3, 4):
    runs = rng.normal(4.0, 0.1, count)
    row = {"runs": str(count), "x": str(runs.mean()), "x std": str(runs.std(ddof=1))}
    row |= {"x min": str(runs.min()), "x max": str(runs.max())}
    np.testing.assert_allclose(verdicts.seeds_of(row, "x"), np.sort(runs), rtol=1e-12)
  # n = 4 and 4: t of Welch's degrees of freedom times the error of the difference.
  (longhorn,) = verdicts.COMPARISONS["Longhorn against Mamba"]
  assert isinstance(longhorn, verdicts.Difference)
  first, second = (np.asarray(x) for x in longhorn.values())
  errors = [x.var(ddof=1) / 4 for x in (first, second)]
  freedom = sum(errors) ** 2 / sum(error**2 / 3 for error in errors)
  reach = stats.t.ppf(0.975, freedom) * math.sqrt(sum(errors))
  found = first.mean() - second.mean()
  assert longhorn.text == f"{found:+.3f} [{found - reach:.3f}, {found + reach:.3f}]"


def test_ratio_has_the_interval_at_whose_ends_the_paired_test_is_at_five_percent():
  rng = np.random.default_rng(1)
  gap = rng.normal(1.0, 0.2, 5)
  closed = 0.3 * gap + rng.normal(0, 0.1, 5)
  ends = verdicts.fieller(closed, gap)
  assert ends[0] < closed.mean() / gap.mean() < ends[1]
  for end in ends:
    assert stats.ttest_1samp(closed - end * gap, 0).pvalue == pytest.approx(0.05, rel=1e-6)
  assert all(map(math.isnan, verdicts.fieller(closed, gap - gap.mean())))  # no gap is seen
