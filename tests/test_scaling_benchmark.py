"""The benchmark of several devices: what it rejects, what it compares, one small run."""

import csv

import numpy as np
import pytest

from benchmarks import scaling
from train.config import Mesh

SMALL = {
  "model": {"dim": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 257},
  "data": {"tokenizer": "bytes"},
}
SIZES = {"seq_len": 16, "global_batch": 2, "accumulate": 1, "loss_chunk": 32}


def run(tmp_path, *options):
  values = {f"{group}.{name}": x for group in SMALL for name, x in SMALL[group].items()} | SIZES
  changes = [word for name, x in values.items() for word in ("--set", f"{name}={x}")]
  table = tmp_path / "rows.csv"
  once = ["--steps", "1", "--runs", "1", "--devices", "1", "--out", str(table)]
  rows = scaling.main(["--config", "configs/quickstart.py", *changes, *once, *options])
  with table.open() as file:
    assert list(csv.DictReader(file)) == rows
  return rows


@pytest.mark.slow
def test_one_device_is_the_measure(tmp_path):
  (row,) = run(tmp_path)
  assert (row["devices"], row["efficiency"], row["axes"], row["rows"]) == ("1", "1.000", "-", "2")
  assert float(row["tokens_per_second"]) > 0
  assert row["mfu"] == "-"  # the peak of this processor is not known


@pytest.mark.slow
def test_a_wrong_result_is_not_timed(tmp_path, monkeypatch):
  monkeypatch.setattr(scaling, "agrees", lambda *args: False)
  (row,) = run(tmp_path)
  assert (row["step_ms"], row["tokens_per_second"]) == ("wrong", "-")


@pytest.mark.parametrize(
  ("metrics", "right"),
  [
    ([[2.0, 1.0], [1.9, 0.9]], True),
    ([[2.0, 1.0], [1.9 * 1.001, 0.9]], False),
    ([[2.0, 1.0], [1.9, 0.9 * 1.01]], False),
    ([[2.0, 1.0], [np.nan, 0.9]], False),
  ],
)
def test_every_checked_step_must_agree(metrics, right):
  assert scaling.agrees(metrics, [[2.0, 1.0], [1.9, 0.9]], "float32") == right


def test_axes_divide_the_devices():
  assert scaling.mesh_of("fsdp", 4) == Mesh(data=1, fsdp=4)
  assert scaling.mesh_of("fsdp x sequence", 4) == Mesh(data=1, fsdp=2, sequence=2)
  assert scaling.mesh_of("data", 2) == Mesh(data=2)
  for axes, devices in (("rows", 2), ("fsdp x sequence", 3), ("data x fsdp x sequence", 8)):
    with pytest.raises(ValueError, match="name one of data, fsdp, sequence, tensor"):
      scaling.mesh_of(axes, devices)


def test_copies_of_a_batch_hold_it_again_and_again():
  batch = {"tokens": np.arange(6).reshape(2, 3)}
  assert (scaling.copies(batch, 2)["tokens"][2:] == batch["tokens"]).all()
