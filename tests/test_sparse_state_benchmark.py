"""`python -m benchmarks.sparse_state` at a size for a CPU."""

import csv
import json

import pytest

from benchmarks import sparse_state

SMALL = ["--tokens", "64", "--partitions", "4", "--heads", "1", "--width", "8", "--calls", "1"]


def run(tmp_path, *options):
  table = tmp_path / "rows.csv"
  rows = sparse_state.main([*SMALL, "--runs", "1", "--out", str(table), *options])
  with table.open() as file:
    assert list(csv.DictReader(file)) == [{n: str(x) for n, x in row.items()} for row in rows]
  return rows


def one(*options):
  return sparse_state.main([*SMALL, "--runs", "1", "--dtype", "float32", "--one", *options])[0]


@pytest.mark.slow
def test_a_row_is_compared_and_timed(monkeypatch, capsys):
  turns = []
  monkeypatch.setattr(sparse_state, "CHECKED", 16)
  monkeypatch.setattr(sparse_state.turns, "wait", lambda: turns.append(1))
  row = one("--only", "mask")
  assert json.loads(capsys.readouterr().out) == row
  assert float(row["forward_ms"]) > 0
  assert float(row["backward_ms"]) > 0
  assert float(row["error"]) < 2e-5
  assert turns == [1]


def test_a_wrong_form_is_not_timed(monkeypatch):
  monkeypatch.setattr(sparse_state, "error_of", lambda *args: 0.5)
  row = one("--only", "mask")
  assert row["note"].startswith("wrong")
  assert "forward_ms" not in row


def test_a_form_with_nan_in_one_of_several_arrays_is_wrong(monkeypatch):
  errors = {"out": 1e-6, "gradient": float("nan")}
  monkeypatch.setattr(sparse_state.accuracy, "named_errors", lambda got, want: errors)
  monkeypatch.setattr(sparse_state, "function", lambda *args: lambda x: x["v"])
  monkeypatch.setattr(sparse_state, "expected", lambda *args: None)
  assert one("--only", "mask")["note"].startswith("wrong")


def test_rows_of_a_table_are_kept(tmp_path, monkeypatch):
  measured = {"forward_ms": "1.0", "backward_ms": "2.0"}
  monkeypatch.setattr(sparse_state.turns, "take", lambda commands: iter([measured] * len(commands)))
  run(tmp_path, "--only", "gla", "mask")
  measured["note"] = "again"
  kept = run(tmp_path, "--keep", "--only", "gla", "mask", "loop", "--most-rows", "1")
  assert [(row["form"], str(row["N"])) for row in kept] == [
    ("gla", "0"),
    ("mask", "4"),
    ("loop", "4"),
  ]
  assert [row["note"] for row in kept] == ["", "", "more than 1 rows N T"]


@pytest.mark.slow
def test_every_form_is_right(tmp_path, capsys):
  rows = run(tmp_path, "--dtype", "float32")
  assert [row["note"] for row in rows] == [""] * 4
  assert "varlen N=4 / gla" in capsys.readouterr().out
