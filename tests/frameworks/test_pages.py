"""The pages docs/frameworks: their examples run, and the table of LCSM is the computed one."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.frameworks import table_1

PAGES = sorted((Path(__file__).parents[2] / "docs" / "frameworks").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_print_what_stands_in_them(page):
  examples = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
  assert examples
  for code in examples:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
      exec(compile(code, page.name, "exec"), {})
    comments = re.findall(r"# (.*)$", code, re.MULTILINE)
    printed = printed.getvalue().splitlines()
    assert printed and [line for line in comments if line in printed] == printed


@pytest.mark.slow
def test_table_1_is_the_computed_one():
  """If not: python -m tests.frameworks.table_1"""
  assert table_1.PLACE.findall(table_1.PAGE.read_text()) == [table_1.table()]
