"""Every row of docs/claims.md names a test, a command, a config or a page that exists."""

import re
import shlex
from pathlib import Path

from train.cli.main import _parser
from train.tasks.registry import TASKS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/claims.md").read_text()
ROWS = re.findall(r"^\| (?!claim \|).*$", PAGE, re.M)


def test_tests_and_files_of_the_claims_exist():
  found = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
  assert len(found) > 20
  for file, name in found:
    assert f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"
  files = re.findall(r"(configs/[\w/]+\.py)", PAGE) + [
    f"docs/{page}" for page in re.findall(r"\]\(([\w/]+\.md)\)", PAGE)
  ]
  assert [file for file in files if not (ROOT / file).is_file()] == []
  tasks = re.findall(r"train task (\w+)", PAGE)
  assert set(tasks) <= {task.name for task in TASKS}
  programs = {"long_context", "sparse_state", "sparse_training"}
  assert set(re.findall(r"-m benchmarks\.(\w+)", PAGE)) == programs


def test_commands_of_the_claims_are_complete():
  found = re.findall(r"`python -m train ([^`]+)`", PAGE)
  assert len(found) > 10
  for command in found:
    _parser().parse_args(shlex.split(command))  # exits with 2 if an argument is missing


def test_each_experiment_has_a_command_or_a_reason():
  page = (ROOT / "docs/tasks.md").read_text()
  rows = re.findall(r"^\| (E\d+) \| ([^|]+) \| (.+) \|$", page, re.M)
  assert [name for name, _, _ in rows] == [f"E{number}" for number in range(1, 26)]
  for name, _, how in rows:
    words = re.findall(r"`(task [\w-]+|fit|sweep|classify|python -m benchmarks)[^`]*`", how)
    assert words or re.match(r"impossible here: \w+", how), name
    tasks = {word.split()[1] for word in words if word.startswith("task ")}
    assert tasks <= {task.name for task in TASKS}, name
    files = re.findall(r"configs/[\w/]+\.py", how)
    files += [f"benchmarks/{module}.py" for module in re.findall(r"benchmarks\.(\w+)", how)]
    assert [file for file in files if not (ROOT / file).exists()] == [], name


def test_each_claim_has_evidence_and_one_kind_of_verdict():
  for row in ROWS:
    claim, evidence, verdict = (cell.strip() for cell in row.strip("|").split(" | "))
    assert claim and ("`" in evidence or "](" in evidence or evidence == "the same"), row
    assert re.match(r"\*\*(holds|does not hold|in part|not run|not here)\*\*", verdict), row
    if verdict.startswith(("**holds", "**does not", "**in part")):
      assert "::" in evidence or ".md)" in evidence, f"a verdict without a test or numbers: {row}"
