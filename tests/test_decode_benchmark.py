"""The benchmark of single steps: small runs on a CPU."""

import csv
import json
from concurrent import futures

import jax.numpy as jnp
import pytest

from benchmarks import decode, generation
from lnssm_jax.ops.linear_attention import pallas


@pytest.mark.slow
def test_single_steps_are_compared_then_timed(tmp_path):
  table = tmp_path / "decode.csv"
  options = ["--steps", "2", "--groups", "1", "--layers", "2", "--copy-mib", "1"]
  rows = decode.main(
    [*options, "--only", "wkv4", "--batches", "2", "--no-models", "--out", str(table)]
  )
  with table.open() as file:
    assert list(csv.DictReader(file)) == rows
  kernel, *xla = rows
  assert "an NVIDIA GPU since Ampere" in kernel["note"] and not kernel["us"]
  assert [row["who"] for row in xla] == ["chunked", "reference"]
  assert all(float(row["us"]) > 0 and row["floor_share"] for row in xla)
  assert all(float(row["error_state"]) < 1e-6 for row in xla)


@pytest.mark.slow
def test_a_wrong_step_is_not_timed(monkeypatch):
  monkeypatch.setitem(decode.LIMITS, False, 0.0)
  program, programs = decode.compiled(decode.CASES["diagonal_scan"], "reference", 1, 2, 1), {}
  programs["reference"] = futures.Future()
  programs["reference"].set_result(program)
  (row,) = decode.rows_of("diagonal_scan", 1, 1e12, programs, steps=2, groups=1, layers=1)
  assert row["us"] == "WRONG" and not row["floor_share"]


@pytest.mark.slow
def test_models_generate_with_and_without_kernels_for_steps(capsys):
  """On a CPU the two are the same, but the kernels were asked for."""
  asked = []
  from_table = pallas.preferred
  with generation.single_steps(kernels=True):
    x = jnp.ones((1, 1, 1, 8))
    asked.append(pallas.preferred((x,), None))
  with generation.single_steps(kernels=False):
    asked.append(pallas.preferred((x,), None))
  assert asked == [True, False] and pallas.preferred is from_table
  sizes = ["--layers", "1", "--model-dim", "8", "--model-vocab", "5", "--model-batches", "2"]
  decode.main(["--only", *sizes, "--tokens", "2", "--copy-mib", "1"])
  lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if "{" in line]
  assert [line["steps"] for line in lines] == ["kernels", "XLA"]
  assert all(line["tokens_per_second"] > 0 for line in lines)
