"""The measurements of the scans: small runs, and what they make of wrong results."""

import csv
import functools

import jax
import numpy as np
import pytest

from benchmarks import (
  csv_rows,
  kernel_cases,
  kernels,
  numerics,
  plot_kernels,
  scan_kernels,
  scan_peers,
  scans,
  serving,
)


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


@pytest.mark.slow
def test_kernels_are_compared_then_timed(tmp_path, capsys):
  table = tmp_path / "kernels.csv"
  options = ["--calls", "2", "--groups", "1", "--copy-mib", "1", "--no-peers", "--out", str(table)]
  forms = ["--implementations", "pallas", "chunked", "--only", "channel-constant-normalized"]
  shapes = ["--shapes", "2,32,3,16,16", "2,1,3,16,16", "--tiles", "16"]
  rows = kernels.main([*options, *forms, *shapes])
  with table.open() as file:
    assert list(csv.DictReader(file)) == rows
  assert "TB/s" in capsys.readouterr().out
  # No GPU here: the kernels say so and the others go on.
  assert [row["who"] for row in rows] == ["pallas", "chunked"] * 2 + [
    kernels.DECODE,
    f"{kernels.DECODE}, tile 16",
  ]
  kernel_rows = [row for row in rows if row["who"] != "chunked"]
  assert all(row["note"] and not row["forward_ms"] for row in kernel_rows)
  assert "device is a cpu" in kernel_rows[-1]["note"]
  step, decoding = (row for row in rows if row["who"] == "chunked")
  assert float(step["forward_ms"]) > 0 < float(step["both_ms"])
  assert float(decoding["forward_ms"]) > 0 and not decoding["both_ms"]
  assert all(row["compile_s"] and row["floor_share"] for row in (step, decoding))
  assert step["error_out"].split(" ", 1)[1] in ("out", "kv", "key_sum")
  assert step["error_gradient"].split(" ", 1)[1] in ("d q", "d k", "d v", "d log_decay")


@pytest.mark.slow
def test_a_wrong_kernel_is_not_timed(monkeypatch):
  monkeypatch.setattr(kernels, "LIMIT", 0.0)
  options = ["--calls", "1", "--groups", "1", "--copy-mib", "1", "--no-peers"]
  forms = ["--implementations", "chunked", "--only", "no-decay", "--shapes", "1,16,2,16,16"]
  (row,) = kernels.main([*options, *forms])
  assert row["forward_ms"] == row["both_ms"] == "WRONG"
  assert not row["floor_share"]


@pytest.mark.slow
@pytest.mark.parametrize(
  "name", [pytest.param("scalar-constant", marks=pytest.mark.slow), "channel-step-bonus"]
)
def test_a_peer_is_held_to_the_same_reference(name, tmp_path):
  """Results that fla's process would save, by the chunked form; then with one spoiled."""
  case, shape = kernel_cases.CASES[name], kernel_cases.Shape(2, 32, 3, 16, 32)
  arrays = kernel_cases.make_inputs(case, shape, 0)
  cotangent = jax.random.normal(jax.random.key(1), arrays["v"].shape)
  inside = kernel_cases.only_corner(cotangent)
  run = jax.jit(lambda x, w: kernel_cases.gradients(case, x, w, "chunked"))
  out, gradient = run(arrays, inside)
  saved = arrays | {"out": out, "cotangent": cotangent}
  saved |= {f"d {name}": x for name, x in gradient.items()}
  plain = lambda name: "out" if name == "cotangent" else name.removeprefix("d ")
  saved = {name: kernel_cases.corner(case, plain(name), x) for name, x in saved.items()}
  timed = {"op": "op", "corner": "it.npz", "forward_ms": 1.0, "both_ms": 2.0, "compile_s": 3.0}

  np.savez(tmp_path / "it.npz", **saved)
  row = kernels.peer_row(case, timed, tmp_path)
  assert (row["forward_ms"], row["both_ms"]) == (1.0, 2.0)
  np.savez(tmp_path / "it.npz", **saved | {"d k": 1.1 * saved["d k"]})
  row = kernels.peer_row(case, timed, tmp_path)
  assert (row["forward_ms"], row["both_ms"]) == (1.0, "WRONG")
  assert row["error_gradient"].endswith("d k")
  ours = kernels.finished({"forward_ms": 0.5, "both_ms": 4.0}, (0.25, 1.0), row)
  assert (ours["fla_x"], ours["fla_x_both"], ours["floor_share"]) == ("2.00", "", "0.50")


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
    columns = {"case": case, "shape": shape, "who": who, "forward_ms": ms, "both_ms": "3.0"}
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
  options = ["--clients", "8", "--new", "16", "--prompt", "16", "--rounds", "1"]
  row = serving.main(["--body", "gla", "--sizes", sizes, *options])
  assert row["equal"] == 8 and row["ratio"] == pytest.approx(
    row["serve"] / row["generate"], abs=1e-3
  )
