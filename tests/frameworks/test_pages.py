"""The pages docs/frameworks: their examples run, and the table of LCSM is the computed one."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.frameworks import table_1
from tests.pages import blocks_of

PAGES = sorted((Path(__file__).parents[2] / "docs" / "frameworks").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_print_what_stands_in_them(page):
  examples = blocks_of(page.read_text())
  assert examples
  for code in examples:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
      exec(compile(code, page.name, "exec"), {})
    comments = re.findall(r"# (.*)$", code, re.MULTILINE)
    printed = printed.getvalue().splitlines()
    assert printed and [line for line in comments if line in printed] == printed


LINES = table_1.PLACE.findall(table_1.PAGE.read_text())[0].splitlines()


def test_table_1_has_a_row_of_each_method():
  assert LINES[:2] == table_1.HEAD
  assert [line.split("`")[1] for line in LINES[2:]] == list(table_1.METHODS)


# Each of "1", "constant" and "token", and most forms of o; the others are like one of these.
@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in ("gfw", "lrn", "mamba", "tnl")))
    for name in table_1.METHODS
  ],
)
def test_row_of_table_1_is_the_computed_one(name):
  """If not: python -m tests.frameworks.table_1"""
  assert table_1.row(name) in LINES
