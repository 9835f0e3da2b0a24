"""`python -m benchmarks.sparse_state` at a size for a CPU."""

import csv

import pytest

from benchmarks import sparse_state

SMALL = ["--tokens", "64", "--partitions", "4", "--heads", "1", "--width", "8", "--calls", "1"]


def run(tmp_path, *options):
  table = tmp_path / "rows.csv"
  rows = sparse_state.main([*SMALL, "--runs", "1", "--out", str(table), *options])
  with table.open() as file:
    assert list(csv.DictReader(file)) == [{n: str(x) for n, x in row.items()} for row in rows]
  return rows


def test_rows_are_compared_and_timed(tmp_path, monkeypatch):
  monkeypatch.setattr(sparse_state, "CHECKED", 16)
  rows = run(tmp_path, "--dtype", "float32", "--only", "gla", "mask")
  assert [(row["form"], row["N"]) for row in rows] == [("gla", 0), ("mask", 4)]
  for row in rows:
    assert not row["note"]
    assert float(row["forward_ms"]) > 0
    assert float(row["backward_ms"]) > 0
  assert float(rows[1]["error"]) < 2e-5
  kept = run(tmp_path, "--keep", "--only", "gla", "mask", "loop", "--most-rows", "1")
  assert [row["form"] for row in kept] == ["gla", "mask", "loop"]
  assert kept[2]["note"] == "more than 1 rows N T"


@pytest.mark.slow
def test_every_form_is_right(tmp_path, capsys):
  rows = run(tmp_path, "--dtype", "float32")
  assert [row["note"] for row in rows] == [""] * 4
  assert "varlen N=4 / gla" in capsys.readouterr().out


def test_a_wrong_form_is_not_timed(tmp_path, monkeypatch):
  monkeypatch.setattr(sparse_state, "error_of", lambda *args: 0.5)
  (row,) = run(tmp_path, "--only", "mask")
  assert row["note"].startswith("wrong")
  assert row["forward_ms"] == ""
