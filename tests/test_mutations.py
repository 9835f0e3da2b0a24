"""The planted faults still apply, in one place each; `scripts/mutations.py` runs their tests."""

import ast
import collections
import functools
import importlib.util
import shlex
from pathlib import Path, PurePath

import pytest
from _pytest.mark import KeywordMatcher
from _pytest.mark.expression import Expression

ROOT = Path(__file__).resolve().parents[1]


def mutations():
  spec = importlib.util.spec_from_file_location("mutations", ROOT / "scripts" / "mutations.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_planted_faults_apply_in_one_place_and_parse():
  script = mutations()
  faults, sources = script.read_faults(), script.read_sources()
  assert len({fault.name for fault in faults}) == len(faults) >= 180
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


def by_place(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
  """The tests that are not slow by their folders, file, function and own name."""
  places = collections.defaultdict(list)
  for item in items:
    if not item.get_closest_marker("slow"):
      file, _, function = item.nodeid.partition("[")[0].partition("::")
      folders = [folder.as_posix() for folder in PurePath(file).parents]
      for place in {*folders, file, f"{file}::{function}", item.nodeid}:
        places[place].append(item)
  return places


matcher = functools.cache(KeywordMatcher.from_item)


def default_tests(arguments: str, places: dict[str, list[pytest.Item]]) -> list[pytest.Item]:
  """Those of the tests that pytest's `arguments` choose."""
  place, *options = shlex.split(arguments)
  chosen = places.get(place, [])
  if options:
    flag, expression = options
    assert flag == "-k", arguments
    matches = Expression.compile(expression).evaluate
    chosen = [item for item in chosen if matches(matcher(item))]
  return chosen


def test_planted_faults_have_tests_in_the_default_suite(request):
  options = request.config.option
  if options.keyword or request.config.args != request.config.getini("testpaths"):
    pytest.skip("only a run of the whole suite knows all tests")
  places = by_place(request.session.items)
  faults = [(fault.name, tests) for fault in mutations().read_faults() for tests in fault.tests]
  assert [(name, tests) for name, tests in faults if not default_tests(tests, places)] == []


def test_default_tests_are_chosen_as_pytest_does(request):
  here = [item for item in request.session.items if item.path == Path(__file__)]
  places = by_place(here)
  names = lambda arguments: [item.name for item in default_tests(arguments, places)]
  assert names("tests/test_mutations.py -k 'chosen and not apply'") == [request.node.name]
  assert names(f"tests/test_mutations.py::{request.node.name}") == [request.node.name]
  assert names("tests/train") == names("tests/test_mutations.py -k elsewhere") == []
