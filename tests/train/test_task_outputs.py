"""The files that tasks and experiments writes: checked before a task runs, whole or not at all."""

import argparse
import json
import sys

import pytest

from experiments import command as experiments
from experiments import mqar_training, samples
from tests.train.test_copies import settings
from train.cli.main import main
from train.data import DataError
from train.scoring import arguments, registry
from train.scoring.report import Report


@pytest.mark.parametrize(
  ("command", "message"),
  [
    (
      "experiments mqar --config x --write no/x.npz",
      "--write: there is no folder no for no/x.npz; create it",
    ),
    ("experiments mqar --config x --write x", "--write: x must end in .npz"),
    ("experiments rouge m x --kind eli5 --write x.json", "--write: x.json must end in .jsonl"),
    ("train task cost --config x --json .", "--json: . is a folder; name a file"),
    ("train task extrapolate m x --plot x.xyz", "--plot: x.xyz must end in .eps or "),
    ("train task scores m x --plot no/x.PNG", "--plot: there is no folder no for no/x.PNG"),
  ],
)
def test_output_that_cannot_be_written_is_named_before_the_task_runs(
  command, message, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(SystemExit) as caught:
    program, *words = command.split()
    {"train": main, "experiments": experiments.main}[program](words)
  assert caught.value.code == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert message in line


def test_picture_without_matplotlib_names_the_package(monkeypatch):
  monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
  with pytest.raises(argparse.ArgumentTypeError, match="pip install matplotlib"):
    arguments.picture("x.png")


def test_json_of_a_task_that_writes_data_raises(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  command = ["rouge", "m", "x", "--kind", "eli5", "--write", "x.jsonl"]
  assert experiments.main([*command, "--json", "x.json"]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: --json=x.json has no numbers to write: --write=x.jsonl")


def test_report_is_printed_and_written_before_it_is_drawn(tmp_path, capsys):
  def draw(path):
    raise OSError("the disk is full")

  report = Report("lm", {}, {"sets": [{"bits": 0.5}]}, draw=draw)
  task = arguments.Task("lm", "", lambda options: report, lambda parser: None)
  file = tmp_path / "x.json"
  with pytest.raises(DataError, match=r"cannot write x.png: the disk is full"):
    registry._runner(task)(argparse.Namespace(json=file, plot="x.png"))
  assert "0.5000" in capsys.readouterr().out
  assert json.loads(file.read_text())["sets"] == [{"bits": 0.5}]
  with pytest.raises(DataError, match=r"cannot write .*no/x.json"):
    registry._runner(task)(argparse.Namespace(json=tmp_path / "no" / "x.json"))


def test_rows_replace_a_file_only_if_all_of_them_are_valid(tmp_path):
  def rows():
    yield "prompt", " completion"
    raise DataError("the second row is wrong")

  path = tmp_path / "rows.jsonl"
  path.write_text("old")
  with pytest.raises(DataError, match="second row"):
    samples.write_training_rows(path, rows())
  assert path.read_text() == "old"
  assert samples.write_training_rows(path, [("é", " b")]) == 1
  assert path.read_text(encoding="utf-8") == '{"prompt": "é", "completion": " b"}\n'
  assert list(tmp_path.iterdir()) == [path]


def test_arrays_have_the_name_they_are_given(tmp_path):
  task, path = mqar_training.task_of(settings(), pairs=3, vocab_size=40), tmp_path / "data"
  mqar_training.write(task, path, train_rows=2, test_rows=2)
  assert list(tmp_path.iterdir()) == [path]
  with pytest.raises(DataError, match=r"cannot write .*no/x.npz"):
    mqar_training.write(task, tmp_path / "no" / "x.npz", train_rows=2, test_rows=2)
