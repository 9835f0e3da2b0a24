"""The measurements of the scans: small runs, and what they make of wrong results."""

import pytest

from benchmarks import csv_rows, numerics, scans


def test_errors_are_measured_for_every_tensor():
  rows = numerics.measure("wkv4", lengths=(16,))
  assert {row["form"] for row in rows} == {"chunked", "associative"}
  assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}
  assert {row["strength"] for row in rows} == set(numerics.STRENGTHS)
  assert {"out", "d k", "d v", "d decay_rate", "d state.max"} <= {row["tensor"] for row in rows}
  assert all(0 <= float(row["error"]) <= float(row["limit"]) for row in rows)
  # One line for each form and dtype, one for each of their tensors in the long table.
  assert len(numerics.summary(rows).splitlines()) == 2 + 3
  tensors = {(row["form"], row["dtype"], row["tensor"]) for row in rows}
  assert len(numerics.details(rows).splitlines()) == 4 + len(tensors)


def test_a_wrong_result_is_not_timed(monkeypatch):
  monkeypatch.setattr(scans.contract, "tolerance", lambda dtype, length: 0.0)
  rows = scans.measure("wkv4", 8, 4)
  assert {row["ms"] for row in rows} == {"wrong"}
  assert scans.exponent(rows[:2], "T", "ms") == "-"
  assert "wrong" in scans.summary(rows)


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_exponents_are_slopes(power):
  rows = [{"T": str(n), "ms": f"{3e-3 * n**power:.6f}"} for n in (100, 200, 400)]
  assert float(scans.exponent(rows, "T", "ms")) == pytest.approx(power, abs=0.01)


def test_rows_of_other_scans_are_kept(tmp_path):
  table = tmp_path / "rows.csv"
  assert csv_rows.read(table, without=["wkv4"]) == []
  rows = [{"scan": "wkv4", "ms": "1.5"}, {"scan": "attention", "ms": "wrong"}]
  csv_rows.write(table, ("scan", "ms"), rows)
  assert csv_rows.read(table, without=[]) == rows
  assert csv_rows.read(table, without=["wkv4"]) == rows[1:]
