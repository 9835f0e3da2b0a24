"""`python -m benchmarks.mixers`: rows of processes that measure, or that are too late."""

import pytest

from benchmarks import mixers

TINY = ["model.num_layers=1", "model.dim=32", "model.num_heads=2", "global_batch=2", "seq_len=64"]


def run(tmp_path, *options):
  out = tmp_path / "mixers.csv"
  settings = [f"--set={setting}" for setting in TINY]
  rows = mixers.main(
    [
      "--config",
      "configs/quickstart.py",
      *settings,
      "--steps=1",
      "--runs=1",
      f"--out={out}",
      *options,
    ]
  )
  assert out.read_text().count("\n") == 1 + len(rows)
  return rows


@pytest.mark.slow
def test_late_rows_are_named_and_their_processes_end(tmp_path):
  rows = run(tmp_path, "--only", "rwkv4", "gla", "--patience=0.3", "--jobs=1")
  assert [row["mixer"] for row in rows] == ["rwkv4", "gla"]
  assert all(row["note"].endswith("not ready in time") for row in rows)


@pytest.mark.slow
def test_rows_are_measured(tmp_path):
  rows = run(tmp_path, "--only", "rwkv4", "lnssm", "--jobs=2")
  assert [row["mixer"] for row in rows] == ["rwkv4", "lnssm"]
  for row in rows:
    assert not row["note"]
    assert float(row["step_ms"]) > 0
    assert row["tokens_per_second"] > 0
  kept = run(tmp_path, "--only", "rwkv4", "gla", "--keep", "--patience=0")
  assert [row["mixer"] for row in kept] == ["rwkv4", "lnssm", "gla"]
  assert float(kept[0]["step_ms"]) == float(rows[0]["step_ms"])
