"""Plots of the curves of runs."""

import json
import shutil
from pathlib import Path

import pytest
from matplotlib import pyplot
from matplotlib.colors import to_hex

from train.cli.main import main
from train.logging import plot

ROWS = [
  {"kind": "eval", "step": 0, "set": "books", "val_loss": 5.5, "bits_per_byte": None},
  {"kind": "train", "step": 1, "loss": 5.0},
  {"kind": "train", "step": 2, "loss": 4.0},
  {"kind": "eval", "step": 2, "set": "books", "val_loss": 4.5, "bits_per_byte": 1.5},
]


@pytest.fixture
def run(tmp_path):
  folder = tmp_path / "run"
  folder.mkdir()
  lines = [json.dumps(row) + "\n" for row in ROWS]
  (folder / "metrics.jsonl").write_text("".join(lines) + '{"kind": "tra')  # still being written
  return folder


def test_plot_curves_read(run):
  training, validation = plot.read(run)
  assert training == ([1, 2], [5.0, 4.0])
  assert validation == {"books, nats per token": ([0], [5.5]), "books": ([2], [1.5])}
  steps, values = plot.smoothed(([1, 2, 3], [5.0, 4.0, 2.0]), 2)
  assert (list(steps), list(values)) == ([1, 2, 3], [5.0, 4.5, 3.0])


@pytest.mark.slow
def test_plot_runs_drawn(run, tmp_path, capsys):
  picture = tmp_path / "compared.png"
  assert main(["plot", str(run), str(run), "--output", str(picture)]) == 0
  assert picture.read_bytes().startswith(b"\x89PNG")
  assert capsys.readouterr().out == f"{picture}\n"
  assert main(["plot", str(run)]) == 0
  assert (run / "losses.png").is_file()


def test_plot_has_one_color_per_run_and_a_legend_in_every_panel(run, tmp_path, monkeypatch):
  other = tmp_path / "other"
  other.mkdir()
  rows = [row for row in ROWS if row["kind"] == "train"] + [ROWS[0] | {"set": "wiki"}]
  (other / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  monkeypatch.setattr(pyplot, "close", lambda figure: None)
  plot.draw([run, other], tmp_path / "a.png")
  figure = pyplot.gcf()
  panels = {axis.get_title(): axis for axis in figure.axes if axis.lines}
  units = {name: axis.get_ylabel() for name, axis in panels.items()}
  nats = dict.fromkeys(("training", "books, nats per token", "wiki, nats per token"), plot._NATS)
  assert units == nats | {"books": "bits per byte"}
  colors = {(line.get_label(), line.get_color()) for axis in panels.values() for line in axis.lines}
  assert len(colors) == 2
  for axis in panels.values():
    names = [line.get_label() for line in axis.lines]
    assert [text.get_text() for text in axis.get_legend().get_texts()] == names
    values = [y for line in axis.lines for y in line.get_ydata()]
    low, high = axis.get_ylim()
    assert low < min(values) <= max(values) < high  # the first points too


def test_plot_of_many_runs_tells_them_apart(run, tmp_path, monkeypatch):
  runs = [tmp_path / f"run {number}" for number in range(21)]
  for path in runs:
    path.mkdir()
    (path / "metrics.jsonl").write_text(json.dumps(ROWS[1]) + "\n")
  monkeypatch.setattr(pyplot, "close", lambda figure: None)
  plot.draw(runs, tmp_path / "a.png")
  lines = pyplot.gcf().axes[0].lines
  assert len({(to_hex(line.get_color()), line.get_linestyle()) for line in lines}) == 21


def test_plot_of_runs_of_one_name_has_their_paths_and_is_written_here(run, tmp_path, monkeypatch):
  other = tmp_path / "more" / "run"
  shutil.copytree(run, other)
  assert plot._labels([run, other]) == [str(run), str(other)]
  assert plot._labels([run, tmp_path / "more"]) == ["run", "more"]
  monkeypatch.chdir(tmp_path)
  assert plot.draw([run, other]) == Path("losses.png")
  assert (tmp_path / "losses.png").is_file() and not (run / "losses.png").exists()


def test_plot_without_run_named(run, tmp_path, capsys):
  assert main(["plot", str(tmp_path), "--output", str(tmp_path / "a.png")]) == 2
  assert f"no metrics in {tmp_path}" in capsys.readouterr().err
  for output in ("a.xyz", "a", "none/a.png"):
    assert main(["plot", str(run), "--output", str(tmp_path / output)]) == 2
    assert (
      f"{output} must be in a folder that exists, and end in one of " in capsys.readouterr().err
    )
  good = '{"kind": "train", "step": 1, "loss": 1.0}'
  (run / "metrics.jsonl").write_text(f"{good}\nnonsense\n")
  with pytest.raises(ValueError, match=r"line 2 of .* is not JSON"):
    plot.read(run)
  (run / "metrics.jsonl").write_text(f"{good}\n{good}\n{{}}\n")
  with pytest.raises(ValueError, match=r"line 3 of .* is damaged \(kind None and step None\)"):
    plot.read(run)
