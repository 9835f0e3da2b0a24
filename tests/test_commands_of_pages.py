"""Commands in README, docs/ and configs/: their options, their settings and configs are valid."""

import re
import shlex
from pathlib import Path

import pytest

from experiments import command as experiments
from experiments.vision.settings import Vision
from train.cli import main as train
from train.cli.commands import config_of
from train.config import apply_overrides, load
from train.config.checked import ConfigError

ROOT = Path(__file__).parents[1]
# Configs that a reader writes, as docs/quickstart.md, docs/pretrained.md and others show.
WRITTEN = {"FILE", "mine.py", "finetune.py", "more.py", "chat.py", "pairs.py"}
PARSERS = {"train": train._parser, "experiments": experiments.parser}


def commands(program: str) -> list[tuple[str, ...]]:
  """(page, groups) of each command with this program, a regular expression that has groups."""
  found = []
  for page in (
    ROOT / "README.md",
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "configs").rglob("*.py"),
    *(ROOT / "experiments").rglob("*.py"),
    *(ROOT / "experiments").rglob("*.md"),
  ):
    text = re.sub(r"\\+\n\s*", " ", page.read_text()).replace("lnssm-train", "python -m train")
    found += [(page.name, *some) for some in re.findall(rf"python -m {program}([^\n`|]*)", text)]
  return found


def helps() -> dict[str, str]:
  """The help of each command by its program and name, such as "train task lm"."""
  choices = lambda parser: parser._subparsers._group_actions[0].choices
  found = {
    f"{program} {name}": command
    for program, parser in PARSERS.items()
    for name, command in choices(parser()).items()
  }
  tasks = choices(found["train task"])
  found |= {f"train task {name}": parser for name, parser in tasks.items()}
  return {name: parser.format_help() for name, parser in found.items()}


def test_options_exist():
  known, wrong = helps(), []
  for page, name, rest in commands(r"(train (?:task )?[a-z][\w-]*|experiments [a-z][\w-]*)"):
    options = re.findall(r"(?<=\s)--[a-z][\w-]*", rest)
    if name not in known or any(option not in known[name] for option in options):
      wrong.append(f"{page}: {name}{rest}")
  modules = r"((?:benchmarks|experiments|tests\.reliability)\.[\w.]*[a-z])"
  for page, name, rest in commands(modules):
    source = (ROOT / f"{name.replace('.', '/')}.py").read_text()
    if "platforms.add_option" in source:
      source += (ROOT / "tests/reliability/platforms.py").read_text()
    for option in re.findall(r"(?<=\s)--(?:no-)?([a-z][\w-]*)", rest):
      if f'"--{option}"' not in source and f'"--no-{option}"' not in source:
        wrong.append(f"{page}: {name}{rest}")
  assert wrong == []


def checked(program: str, line: str) -> bool:
  """Whether a command names a config of this project, which is loaded with its settings.

  Raises:
    SystemExit: an argument is unknown, missing or not a valid value; it was printed.
    ConfigError: the config does not exist, or a setting is unknown or invalid.
  """
  if "--config" not in line or "..." in line:
    return False
  words = ["rwkv6" if word == "NAME" else word for word in shlex.split(line.partition(" # ")[0])]
  options = PARSERS[program]().parse_args(words)
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
  found = commands(r"(train|experiments) ([a-z][\w-]*)")
  assert sum(checked(program, f"{name}{rest}") for _, program, name, rest in found) > 30


@pytest.mark.parametrize(
  "line",
  [
    "train fit --config configs/lnssm_72m.py --set model.dimm=8",
    "train fit --config configs/lnssm_72m.py --set model.dim=eight",
    "train fit --config configs/no.py",
    "experiments mqar --config experiments/configs/mqar.py:ssd --pairs many",
    "experiments rouge --config experiments/configs/mqar.py:ssd",
    "experiments classify --config experiments/configs/vision.py:vil-tiny --set model.patch=5",
  ],
)
def test_wrong_command_is_found(line, monkeypatch):
  monkeypatch.chdir(ROOT)
  with pytest.raises((SystemExit, ConfigError, FileNotFoundError)):
    checked(*line.split(maxsplit=1))
