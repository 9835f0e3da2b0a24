"""`experiments.sparse_training`, `experiments.over_seeds`: a small run, pictures of their files."""

import json

import numpy as np
import pytest
from matplotlib.axes import Axes

from benchmarks import csv_rows
from experiments import long_context, sparse_training
from train.data import IndexedWriter

SMALL = [
  "dim=16",
  "num_layers=1",
  "num_heads=1",
  "channel_hidden=8",
  "length=16",
  "rows=2",
  "steps=2",
]


@pytest.fixture
def drawn(monkeypatch):
  """The axes, places, values and bars of all that is drawn."""
  found, errorbar = [], Axes.errorbar

  def watched(self, x, y, bars, **options):
    found.append((self, x, y, bars))
    return errorbar(self, x, y, bars, **options)

  monkeypatch.setattr(Axes, "errorbar", watched)
  return found


@pytest.mark.slow
def test_small_run_has_a_row_per_copy_and_text(tmp_path, monkeypatch, capsys):
  for name in ("train_books", *sparse_training.VALIDATION):
    with IndexedWriter(tmp_path / name, "uint16") as writer:
      writer.add_document(np.random.default_rng(0).integers(0, 256, 100))
  monkeypatch.setattr(sparse_training.turns, "wait", lambda: None)
  rows = sparse_training.main(["--data", str(tmp_path), "--one", "sse", "--set", *SMALL])
  assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"rows": rows}
  assert [(row["of"], row["seed"]) for row in rows] == [
    (name, seed) for name in sparse_training.VALIDATION for seed in sparse_training.SEEDS
  ]
  assert len({row["score"] for row in rows}) == 3  # a copy has its own, the same of equal texts
  assert all(0 < float(row["score"]) < 20 for row in rows)
  np.testing.assert_allclose([sum(map(float, row["share"].split())) for row in rows], 1, atol=0.03)


def test_file_of_results_is_drawn_with_standard_deviations(tmp_path, drawn, capsys):
  table, picture = tmp_path / "rows.csv", tmp_path / "text.png"
  scores = {
    "val_books": {"sse": (1.0, 2.0, 6.0), "gla": (4.0, 4.0, 7.0)},
    "val_peps": {"gla": (90.0,)},
  }
  rows = [
    dict.fromkeys(sparse_training.FIELDS, "")
    | {"mixer": mixer, "seed": str(seed), "parameters": "9", "score": str(score), "of": name}
    for name, mixers in scores.items()
    for mixer, values in mixers.items()
    for seed, score in enumerate(values)
  ]
  failed = dict.fromkeys(sparse_training.FIELDS, "") | {"mixer": "mom", "note": "out of memory"}
  csv_rows.write(table, sparse_training.FIELDS, [*rows, failed])
  read = sparse_training.main(["--out", str(table), "--plot", str(picture)])
  assert read == [*rows, failed]
  assert "val_books  sse: 3.000 ± 2.646 (3 seeds)" in capsys.readouterr().out
  (books, places, means, (below, above)), (peps, *_, single) = drawn
  assert places == [0, 1]  # gla, sse: the mixers of all pictures are in one order
  np.testing.assert_allclose(means, [5, 3])
  np.testing.assert_allclose(
    [below, above], [[np.std(x, ddof=1) for x in ((4, 4, 7), (1, 2, 6))]] * 2
  )
  np.testing.assert_array_equal(single, 0)
  assert books.get_title() == "text: books" and peps.get_title() == "text: peps"
  assert books.get_ylim()[1] < 10 < peps.get_ylim()[0]  # each text has its own scale
  assert picture.stat().st_size > 5000
  with pytest.raises(SystemExit):
    sparse_training.main(["--out", str(tmp_path / "none.csv")])
  assert "training needs --data" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("part", "measures", "panels", "bars"),
  [
    ("states", ("entropy", "rank"), ("states: entropy", "states: effective rank"), "std"),
    ("babilong", ("accuracy", "another"), ("BABILong: qa1", "BABILong: mean"), "std"),
    ("needles", ("recall", "another"), ("needles qa1", "needles mean"), "range"),
  ],
)
def test_pictures_of_long_context_have_a_panel_per_measure_or_task(
  part, measures, panels, bars, tmp_path, drawn
):
  rows = [
    {"part": part, "mixer": mixer, "measure": measure, "of": task, "length": "8", "parameters": 9}
    | {"value": value}
    for measure in measures
    for task in (("mean",) if part == "states" else ("qa1", "mean"))
    for mixer, values in {"sse": (0.0, 0.5, 1.0), "gla": (0.25, 0.5, 0.75, 1.0)}.items()
    for value in values
  ]
  long_context.draw(rows, part, tmp_path / "picture.png")
  assert tuple(dict.fromkeys(axis.get_title() for axis, *_ in drawn)) == panels
  of_panel = [below for axis, _, _, (below, _) in drawn if axis.get_title() == panels[1]]
  wanted = [0.375, 0.5] if bars == "range" else [np.std((0.25, 0.5, 0.75, 1.0), ddof=1), 0.5]
  np.testing.assert_allclose(np.concatenate(of_panel), wanted)  # of GLA, of SSE
  with pytest.raises(ValueError, match="there are no rows yet"):
    long_context.draw([], part, tmp_path / "picture.png")


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ("foo=3", "'foo=3' sets no known size; use one of dim, num_layers, num_heads,"),
    ("steps=ten", "'steps=ten' must set a whole number of at least 1, such as steps=10."),
    ("steps=0", "'steps=0' must set a whole number of at least 1"),
    ("steps", "'steps' must set a whole number of at least 1"),
  ],
)
def test_wrong_size_ends_before_training_and_leaves_the_file(
  change, message, tmp_path, monkeypatch, capsys
):
  table = tmp_path / "rows.csv"
  csv_rows.write(table, sparse_training.FIELDS, [{"mixer": "gla", "score": "1.0"}])
  before = table.read_bytes()
  monkeypatch.setattr(sparse_training.turns, "take", lambda _: pytest.fail("training began"))
  with pytest.raises(SystemExit, match="2"):
    sparse_training.main(["--data", "none", "--out", str(table), "--set", "rows=2", change])
  assert f"argument --set: {message}" in capsys.readouterr().err
  assert table.read_bytes() == before


def test_wrong_file_or_picture_ends_before_training(tmp_path, capsys):
  old, bare = tmp_path / "old.csv", tmp_path / "bare.csv"
  csv_rows.write(old, (*sparse_training.FIELDS, "task"), [{"task": "recall"}])
  csv_rows.write(bare, sparse_training.FIELDS[1:], [{"seed": 0}])
  for arguments, message in (
    (["--out", str(old)], "old.csv is of another version, which differs in task; measure"),
    (["--out", str(bare)], "bare.csv is of another version, which differs in mixer; measure"),
    (["--data", "none", "--plot", "picture"], "argument --plot"),
    (["--data", "none", "--plot", str(tmp_path / "no" / "a.png")], "argument --plot"),
  ):
    with pytest.raises(SystemExit):
      sparse_training.main(arguments)
    assert message in capsys.readouterr().err
