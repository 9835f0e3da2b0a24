"""The claims of README, CONTRIBUTING and some pages of docs/."""

import ast
import itertools
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import pytest
from flax import nnx

from lnssm_jax.mixers import MIXERS
from lnssm_jax.models import count_parameters
from tests import devices
from tests.pages import blocks_of, wrong_names

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md")
README = (ROOT / "README.md").read_text()
MIXERS_PAGE = (ROOT / "docs" / "mixers.md").read_text()
OWN_MODELS_PAGE = (ROOT / "docs" / "own_models.md").read_text()


def programs(pages: bool) -> list[str]:
  """Those of the README, or of the pages that this file runs; the blocks of the last are one."""
  if not pages:
    return blocks_of(README)
  names = ("mixers", "migration", "training", "sharding", "quickstart", "lcsm", "scoring")
  files = [*(ROOT / "docs" / f"{name}.md" for name in names), ROOT / "experiments" / "README.md"]
  text = "".join(file.read_text() for file in files)
  return [*blocks_of(text), "".join(blocks_of(OWN_MODELS_PAGE))]


STATES = dict(
  re.findall(r"^\| `(\w+)` \|.*\| ([\d,]+)(?:, a cache)? \|$", MIXERS_PAGE, re.MULTILINE)
)


def test_mixers_of_the_readme_are_complete_with_their_states():
  number = lambda size: int(size.replace(",", ""))
  rows = re.findall(r"^\| (`\w+`[\w` ]*) \|.*\| ([\d,–]+) \|.*\|$", README, re.MULTILINE)
  families = [(re.findall(r"\w+", names), size.split("–")) for names, size in rows]
  assert sorted(name for names, _ in families for name in names) == sorted(MIXERS)
  for names, size in families:
    states = [number(STATES[name]) for name in names]
    assert {min(states), max(states)} == set(map(number, size)), names


def test_page_of_mixers_is_complete_with_their_states():
  assert sorted(STATES) == sorted(MIXERS)
  for name, size in STATES.items():
    heads = {"num_heads": 4} if "num_heads" in MIXERS[name].set_by_model else {}
    build = lambda name=name, heads=heads: MIXERS[name](512, **heads, rngs=nnx.Rngs(0))
    state = jax.eval_shape(lambda build=build: build().init_state(1))
    assert count_parameters(state) == int(size.replace(",", "")), name


def test_example_of_a_mixer_is_short():
  _, example = blocks_of(MIXERS_PAGE)
  assert len(example.splitlines()) < 60


def test_measurements_of_the_readme_are_those_of_the_pages():
  pages = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("performance", "kernels"))
  table = re.search(r"\| one GPU, .*?\n\n", README, re.DOTALL)
  assert table is not None
  rows = [line.split("|")[2:4] for line in table[0].splitlines()[2:] if line]
  numbers = re.compile(r"\d+,\d{3}|\d\.\d{3}")
  for ours, theirs in rows:
    found = numbers.findall(ours + theirs)
    assert len(found) in (2, 4), (ours, theirs)
    # One row of a page has all of them, or ours and the next one theirs.
    lines = [numbers.findall(line) for line in pages.splitlines()]
    assert any({*found} <= {*a, *b} for a, b in itertools.pairwise(lines)), found


def test_readme_is_short_and_its_lines_wrap():
  assert len(README.split()) <= 1700
  text = re.sub(r"^```.*?^```$", "", README, flags=re.DOTALL | re.MULTILINE)
  assert [x for x in text.splitlines() if len(x) > 105 and not x.startswith("|")] == []


def test_contributing_takes_five_minutes_to_read():
  assert len((ROOT / "CONTRIBUTING.md").read_text().split()) <= 1000


# Each with names of its own, but in one process: to start jax takes as long as an example.
RUN_EACH = """
import json, sys
from tests import eager
eager.install()
for number, code in enumerate(json.load(sys.stdin)):
  print(f"example {number}", flush=True)
  exec(compile(code, f"example {number}", "exec"), {"__name__": "__main__"})
"""


@pytest.mark.parametrize("pages", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_python_examples_of_the_pages_run(tmp_path, pages):
  codes = programs(pages)
  done = subprocess.run(
    [sys.executable, "-W", "error", "-c", RUN_EACH],
    input=json.dumps(codes),
    cwd=tmp_path,
    env={"PYTHONPATH": str(ROOT)} | devices.flags(1),
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  # What an example prints stands in it as a comment.
  code, run = "", []
  for line in done.stdout.splitlines():
    if number := re.fullmatch(r"example (\d+)", line):
      run.append(code := codes[int(number[1])])
    else:
      assert f"# {line}" in code
  assert run == codes != []


# Pages whose programs other tests run.
ELSEWHERE = {
  "fine_tuning.md": "tests/pretrained/test_chat.py",
  "analysis.md": "tests/analysis/test_page.py",
  "frameworks/dsf.md": "tests/frameworks/test_pages.py",
  "frameworks/lcsm.md": "tests/frameworks/test_pages.py",
  "frameworks/online_learning.md": "tests/frameworks/test_pages.py",
  "pretrained.md": "tests/pretrained/test_page.py",
  "sequence_parallelism.md": "tests/models/test_sequence_parallel.py",
  "sweeps.md": "tests/train/test_sweep_files.py",
}


def test_every_program_of_the_pages_is_run_by_a_test():
  found = [*programs(False), *programs(True)]
  for path in sorted((ROOT / "docs").rglob("*.md")):
    name = str(path.relative_to(ROOT / "docs"))
    for code in blocks_of(path.read_text()):
      assert any(code in program for program in found) != (name in ELSEWHERE), name
  for name, test in ELSEWHERE.items():
    text = (ROOT / test).read_text()
    assert name.split("/")[-1] in text or f'"{name.split("/")[0]}"' in text


def test_names_in_the_python_of_every_page_exist():
  """Also of blocks ```py, which need files that no test has, and of those that slow tests run."""
  for page in [*(ROOT / page for page in PAGES), *sorted((ROOT / "docs").rglob("*.md"))]:
    text = page.read_text()
    assert wrong_names("".join(blocks_of(text, "py(?:thon)?"))) == [], page.name
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for indented in re.findall(r"^\n( {4}.*\n(?: {4}.*\n|\n)*)", outside, re.MULTILINE):
      with pytest.raises(SyntaxError):  # Python would be in a block
        ast.parse(textwrap.dedent(indented))


@pytest.mark.parametrize(
  ("code", "wrong"),
  [
    ("import train.nothing", "train.nothing"),
    ("from lnssm_jax import analysis as a\na.half_livez(model)", "lnssm_jax.analysis.half_livez"),
    ("import train\ntrain.load_model('x', stp=3)", "train.load_model: .*'stp'"),
    ("import train\nloaded = train.load_model('x')\nloaded.scor('a')", "LoadedModel.scor"),
    ("from lnssm_jax.mixers import GLA\nGLA(8, num_heads=2)(x, stat=None)", "GLA.*'stat'"),
    ("from train import config\nconfig.Data(sorces={})", "config.Data: .*'sorces'"),
  ],
)
def test_wrong_name_in_a_page_is_found(code, wrong):
  (found,) = wrong_names(code)
  assert re.fullmatch(wrong, found)


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_of_the_pages_exist(page):
  text = (ROOT / page).read_text()
  named = set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", text, re.MULTILINE))
  targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
  assert named
  assert named <= targets


@pytest.mark.parametrize("page", PAGES)
def test_files_of_the_pages_exist(page):
  text = (ROOT / page).read_text()
  linked = set(re.findall(r"\]\((?!https?:)([^)#]+)", text))
  in_code = set(re.findall(r"`((?:docs|tests|configs|train|lnssm_jax)/[\w./-]+)`", text))
  assert linked | in_code
  assert [name for name in sorted(linked | in_code) if not (ROOT / name).exists()] == []


def test_commands_of_the_readme_exist():
  named = set(re.findall(r"lnssm-train (\w+)", README))
  done = subprocess.run(
    [sys.executable, "-m", "train", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
  )
  assert done.returncode == 0, done.stderr
  assert {"fit", "evaluate", "generate", "tokenize"} <= named
  assert all(re.search(rf"^\s+{name}\b", done.stdout, re.MULTILINE) for name in named)


def test_extras_of_the_readme_exist():
  text = (ROOT / "pyproject.toml").read_text()
  for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
    installs = re.findall(r"pip install [\"']?([\w.-]*)\[([\w,]+)\]", page.read_text())
    for package, extras in installs:
      assert not package.startswith("lnssm"), page  # there is no release on an index
      for extra in extras.split(",") if package == "." else ():
        assert re.search(rf"^{extra} = \[", text, re.MULTILINE), (page, extra)
