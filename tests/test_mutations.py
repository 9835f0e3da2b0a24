"""The planted faults still apply: `scripts/mutations.py` itself takes half an hour."""

import ast
import importlib.util
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def mutations():
  spec = importlib.util.spec_from_file_location("mutations", ROOT / "scripts" / "mutations.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_planted_faults_apply_in_one_place_and_parse():
  script = mutations()
  faults, sources = script.read_faults(), script.read_sources()
  assert len({fault.name for fault in faults}) == len(faults) >= 100
  wrong = []
  for fault in faults:
    try:
      path, text = fault.patched(sources)
      if path.suffix == ".py":
        ast.parse(text)
    except (LookupError, SyntaxError) as error:
      wrong.append(f"{fault.name}: {error}")
  assert not wrong, "\n".join(wrong)


def test_planted_faults_name_tests_that_exist():
  files = [shlex.split(tests)[0] for fault in mutations().read_faults() for tests in fault.tests]
  assert {name for name in files if not (ROOT / name.partition("::")[0]).exists()} == set()
