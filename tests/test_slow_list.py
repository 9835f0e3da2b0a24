"""The tests of slow.txt exist, so that none of its lines is left behind."""

from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_each_line_of_the_slow_list_is_a_test():
  lines = (ROOT / "tests/slow.txt").read_text().splitlines()
  names = [line for line in lines if not line.startswith("#")]
  assert names == sorted(set(names))
  for name in names:
    file, function = name.partition("[")[0].split("::")
    assert f"def {function}(" in (ROOT / file).read_text(), name
