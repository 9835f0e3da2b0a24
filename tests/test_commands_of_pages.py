"""Commands in README, docs/ and configs/: their options, their settings and configs are valid."""

import re
import shlex
from pathlib import Path

import pytest

from train.cli.commands import config_of
from train.cli.main import _parser
from train.config import Vision, apply_overrides, load
from train.config.checked import ConfigError

ROOT = Path(__file__).parents[1]
# Configs that a reader writes; docs/quickstart.md, docs/tasks.md and docs/pretrained.md show three.
WRITTEN = {"FILE", "mine.py", "finetune.py", "more.py"}


def commands(program: str) -> list[tuple[str, str]]:
  """(page, what follows) of each `python -m` with this program, a regular expression."""
  found = []
  for page in (
    ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "configs").rglob("*.py")
  ):  # fmt: skip
    text = re.sub(r"\\+\n\s*", " ", page.read_text())
    found += [(page.name, *some) for some in re.findall(rf"python -m {program}([^\n`|]*)", text)]
  return found


def helps() -> dict[str, str]:
  """The help of each command, and of each task with the name "task NAME"."""
  choices = lambda parser: parser._subparsers._group_actions[0].choices
  commands = choices(_parser())
  tasks = {f"task {name}": parser for name, parser in choices(commands["task"]).items()}
  return {name: parser.format_help() for name, parser in (commands | tasks).items()}


def test_options_exist():
  known, wrong = helps(), []
  for page, name, rest in commands(r"train ((?:task )?[a-z][\w-]*)"):
    options = re.findall(r"(?<=\s)--[a-z][\w-]*", rest)
    if name not in known or any(option not in known[name] for option in options):
      wrong.append(f"{page}: {name}{rest}")
  for page, name, rest in commands(r"((?:benchmarks|tests\.reliability)[\w.]+[a-z])"):
    source = (ROOT / f"{name.replace('.', '/')}.py").read_text()
    if "platforms.add_option" in source:
      source += (ROOT / "tests/reliability/platforms.py").read_text()
    for option in re.findall(r"(?<=\s)--(?:no-)?([a-z][\w-]*)", rest):
      if f'"--{option}"' not in source and f'"--no-{option}"' not in source:
        wrong.append(f"{page}: {name}{rest}")
  assert wrong == []


def checked(line: str) -> bool:
  """Whether a command of `train` names a config of this project, which is loaded with its settings.

  Raises:
    SystemExit: an argument is unknown, missing or not a valid value; it was printed.
    ConfigError: the config does not exist, or a setting is unknown or invalid.
  """
  if "--config" not in line or "..." in line:
    return False
  words = ["rwkv6" if word == "NAME" else word for word in shlex.split(line.partition(" # ")[0])]
  options = _parser().parse_args(words)
  if options.config in WRITTEN:
    return False
  if options.command == "classify":
    apply_overrides(load(options.config, Vision), options.set)
  elif isinstance(getattr(options, "set", None), list):
    config_of(options)
  return True


def test_commands_with_a_config_are_valid(monkeypatch):
  monkeypatch.chdir(ROOT)
  monkeypatch.setenv("LNSSM_DATA", "data")
  lines = [f"{name}{rest}" for _, name, rest in commands(r"train ([a-z][\w-]*)")]
  assert sum(map(checked, lines)) > 30


@pytest.mark.parametrize(
  "line",
  [
    "fit --config configs/lnssm_72m.py --set model.dimm=8",
    "fit --config configs/lnssm_72m.py --set model.dim=eight",
    "fit --config configs/no.py",
    "task mqar --config configs/mqar.py:ssd --pairs many",
    "task rouge --config configs/mqar.py:ssd",
    "classify --config configs/vision.py:vil-tiny --set model.patch=5",
  ],
)
def test_wrong_command_is_found(line, monkeypatch):
  monkeypatch.chdir(ROOT)
  with pytest.raises((SystemExit, ConfigError, FileNotFoundError)):
    checked(line)
