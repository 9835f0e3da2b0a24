"""The tests of slow.txt exist and are cases: whole tests are marked where they stand."""

from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_each_line_of_the_slow_list_is_a_case_of_a_test():
  lines = (ROOT / "tests/slow.txt").read_text().splitlines()
  names = [line for line in lines if not line.startswith("#")]
  assert names == sorted(set(names))
  for name in names:
    assert name.endswith("]"), f"{name}: mark it with @pytest.mark.slow"
    file, function = name.partition("[")[0].split("::")
    assert f"def {function}(" in (ROOT / file).read_text(), name
