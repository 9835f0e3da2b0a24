"""The measurements of the scans: small runs, and what they make of wrong results."""

import csv
import functools

import jax
import numpy as np
import pytest

from benchmarks import csv_rows, numerics, plot_kernels, scan_kernels, scan_peers, scans, serving


@pytest.mark.slow
def test_errors_are_measured_for_every_tensor():
  rows = numerics.measure("wkv4", lengths=(16,))
  assert {row["form"] for row in rows} == {"chunked", "associative"}
  assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}
  assert {row["strength"] for row in rows} == set(numerics.STRENGTHS)
  assert {"out", "d k", "d v", "d decay_rate", "d state.max"} <= {row["tensor"] for row in rows}
  assert all(0 <= float(row["error"]) <= float(row["limit"]) for row in rows)
  assert len(numerics.summary(rows).splitlines()) == 2 + 3  # one line for each form and dtype


@pytest.mark.slow
def test_a_wrong_result_is_not_timed(monkeypatch):
  monkeypatch.setattr(scans.accuracy, "tolerance", lambda dtype, length: 0.0)
  rows = scans.measure("diagonal_scan", 8, 4)
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


@pytest.mark.parametrize("limit", [1e-4, 0.0])
def test_kernels_of_scans_are_compared_then_timed(tmp_path, monkeypatch, limit):
  monkeypatch.setitem(scan_kernels.LIMITS, False, limit)
  table = tmp_path / "scans.csv"
  options = ["--calls", "2", "--groups", "1", "--copy-mib", "1", "--out", str(table)]
  options += ["--documents", "--only", "diagonal_scan", "--sizes", "B=2,T=9,D=17"]
  rows = scan_kernels.main(options)
  with table.open() as file:
    assert list(csv.DictReader(file)) == rows
  assert [row["scan"] for row in rows[::2]] == ["diagonal_scan", "diagonal_scan documents"]
  kernel, xla = rows[:2]
  assert "an NVIDIA GPU since Ampere" in kernel["note"]
  assert (xla["forward_ms"] == "WRONG") == (limit == 0.0) == (xla["both_ms"] == "WRONG")


@pytest.mark.slow
def test_linear_attention_is_compared_with_its_state_then_timed(monkeypatch):
  options = ["--calls", "1", "--groups", "1", "--copy-mib", "1", "--implementations", "chunked"]
  options += ["--only", "channel-constant-normalized", "--sizes", "B=2,T=32,H=3,K=16,V=32"]
  compared, errors = [], scan_kernels.errors
  spy = lambda case, got, want: compared.extend(got) or errors(case, got, want)
  monkeypatch.setattr(scan_kernels, "errors", spy)
  (row,) = scan_kernels.main([*options, "--no-peers"])
  assert float(row["forward_ms"]) > 0 < float(row["both_ms"]) and row["floor_share"]
  names = ["out", "kv", "key_sum", "d q", "d k", "d v", "d log_decay"]
  assert sorted(compared) == sorted(names)


@pytest.mark.slow
def test_a_peer_without_a_decay_is_held_to_a_reference_without_it(monkeypatch):
  """Results that fla's process would return, by the chunked form without decay."""
  name = "channel-constant-normalized"
  case, sizes = scan_kernels.CASES[name], {"B": 2, "T": 32, "H": 3, "K": 16, "V": 32}

  def measure(name, arrays, folder):
    assert "log_decay" not in arrays
    call = lambda x, w: scan_kernels.gradients(case, x, w, "chunked")
    out, gradient = jax.jit(call)({n: arrays[n] for n in "qkv"}, arrays["inside"])
    results = {"out": out} | {f"d {n}": np.asarray(x) for n, x in gradient.items()}
    return {"forward_ms": 1.0, "both_ms": 2.0, "results": results}

  monkeypatch.setattr(scan_peers, "missing", lambda name: None)
  monkeypatch.setattr(scan_peers, "measure", measure)
  (row,) = scan_kernels.rows_of(name, case, sizes, (), 1e12, {})
  assert (row["forward_ms"], row["both_ms"]) == ("1.0000", "2.0000")


@pytest.mark.slow
def test_a_peer_of_the_scans_is_held_to_the_same_reference(monkeypatch):
  """Results that mamba-ssm's process would return, by the chunked form; then one spoiled."""
  name, sizes = "selective_scan", {"B": 2, "T": 9, "D": 17, "N": 3}
  case = scan_kernels.CASES[name]
  rows = lambda: list(scan_kernels.rows_of(name, case, sizes, (), 1e12, {}))
  run = jax.jit(lambda x, w: scan_kernels.gradients(case, x, w, "chunked"))
  given = scan_kernels.make_inputs(case, sizes, 0)
  arrays = {n: x for n, x in given.items() if n != "cotangent"}
  want = scan_kernels.reference(case, arrays, given["cotangent"])
  monkeypatch.setattr(scan_kernels, "make_inputs", lambda *_: given)
  monkeypatch.setattr(scan_kernels, "reference", lambda *_: want)
  (row,) = rows()
  assert row["who"] == "mamba-ssm" and row["note"].endswith("not installed")
  assert not row["forward_ms"] and not row["error_out"]

  def measure(name, arrays, folder, spoil=1.0):
    arrays = {n: scan_peers.from_bits(scan_peers.bits(x)) for n, x in arrays.items()}  # by a file
    out, gradient = run({n: arrays[n] for n in case.axes}, arrays["inside"])
    results = {"out": out} | {f"d {n}": np.asarray(x) for n, x in gradient.items()}
    results["d b"] = results["d b"] * results["d b"].dtype.type(spoil)
    return {"forward_ms": 1.0, "both_ms": 2.0, "results": results}

  monkeypatch.setattr(scan_peers, "missing", lambda name: None)
  monkeypatch.setattr(scan_peers, "measure", measure)
  (row,) = rows()
  assert (row["forward_ms"], row["both_ms"]) == ("1.0000", "2.0000")
  assert row["note"] == "selective_scan_fn"
  monkeypatch.setattr(scan_peers, "measure", functools.partial(measure, spoil=1.1))
  (row,) = rows()
  assert (row["forward_ms"], row["both_ms"]) == ("1.0000", "WRONG")
  assert row["error_gradient"].endswith("d b")


def test_the_picture_has_cases_of_both_libraries_and_right_results_only(tmp_path):
  def row(case, who, ms, error, shape="B1"):
    columns = {"scan": case, "sizes": shape, "who": who, "forward_ms": ms, "both_ms": "3.0"}
    return columns | {"error_out": "1e-3 out", "error_gradient": f"{error} d q"}

  both = [
    row("channel-step", "pallas", "1.0", 4e-3),
    row("channel-step", "fla chunk_gla", "2.0", 2e-3),
  ]
  alone = [row("scalar-step", "pallas", "1.0", 4e-3), row("scalar-step", "fla x", "WRONG", 0.1)]
  complete = plot_kernels.bars(both + alone)
  assert complete == {
    "channel-step": {plot_kernels.OURS: (1.0, 3.0, 4e-3), plot_kernels.THEIRS: (2.0, 3.0, 2e-3)}
  }
  plot_kernels.draw(complete, "title", tmp_path / "kernels.png")
  assert (tmp_path / "kernels.png").stat().st_size > 1000
  with pytest.raises(ValueError, match="no case has a time of both libraries"):
    plot_kernels.bars(alone)
  with pytest.raises(ValueError, match=r"must have one"):
    plot_kernels.bars([*both, row("no-decay", "pallas", "1.0", 4e-3, shape="B2")])


@pytest.mark.slow
def test_served_texts_are_those_of_generate_then_timed():
  pytest.importorskip("uvicorn", reason="the extra `serve` is not installed: no uvicorn")
  sizes = "dim=64,num_layers=2,vocab_size=300,channel_hidden=128"
  options = ["--slots", "8", "--clients", "8", "--new", "16", "--prompt", "16", "--rounds", "2"]
  (row,) = serving.main(["--body", "gla", "--sizes", sizes, *options])
  assert row["equal"] == 8 and row["ratio"] == pytest.approx(
    row["serve"] / row["generate"], abs=1e-3
  )
