"""A run of SSE continues with more partitions, by the commands of docs/mixers.md."""

import re
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.train.test_export import random_params
from train import config, trainer
from train.cli.main import main
from train.runs import export
from train.runs.run_folder import RunFolder

PAGE = (Path(__file__).parents[2] / "docs/mixers.md").read_text()
SMALL = {"lora_rank": 3, "gate_rank": 3, "method": "mask"}


@pytest.mark.slow
def test_commands_of_the_page_continue_a_run_with_the_losses_that_it_had(
  tiny, config_file, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  sizes = {"model__mixer": "sse", "model__mixer_options": SMALL, "steps": 2}
  plan = {"eval_at_start": True, "checkpoint_every": 2, "run_dir": "runs/sse"}
  cfg = tiny(**sizes, **plan)
  config_file(cfg, "sse.py")
  trainer.fit(cfg)
  (block,) = re.findall(r"```py\n([^`]*exported_model[^`]*)```", PAGE)
  (tmp_path / "more.py").write_text(block)
  lines = re.findall(r"^    lnssm-train (.*(?:wider|more\.py).*)$", PAGE, re.MULTILINE)
  assert [line.split()[0] for line in lines] == ["export", "import", "fit"]
  for line in lines:
    assert main(shlex.split(line)) == 0, (line, capsys.readouterr().err)
  wider = RunFolder("runs/wider").load_config()
  options = wider.model.mixer_options
  assert (options["num_partitions"], options.get("num_selected", 1)) == (8, 1)
  rows = {
    folder: [row for row in RunFolder(folder).read_rows() if row["kind"] == "eval"]
    for folder in ("runs/sse", "runs/wider")
  }
  before, after = rows["runs/sse"][-1], rows["runs/wider"][0]
  assert (before["step"], after["step"]) == (2, 0)
  assert after["val_loss"] == pytest.approx(before["val_loss"], rel=1e-6)
  assert rows["runs/wider"][-1]["step"] == 2


def test_sse_of_a_pattern_is_expanded_and_the_other_mixers_stay():
  options = {"sse": SMALL, "lrn": {}}
  model = config.Model(
    dim=16, num_layers=2, num_heads=2, vocab_size=257, mixer=("sse", "lrn"), mixer_options=options
  )
  params = random_params(model)
  wider, changed = export._expanded(params, model, {"num_partitions": 12, "num_selected": 2})
  assert changed.mixer_options["sse"]["num_partitions"] == 12
  assert changed.mixer_options["lrn"] == {}
  shapes = config.to_dict(changed)
  want = jax.tree.map(jax.numpy.shape, export.exports.abstract_params(shapes))
  assert jax.tree.map(np.shape, wider) == want


def test_export_with_a_margin_but_no_partitions_says_what_is_missing(tmp_path, capsys):
  assert main(["export", "runs/none", "--out", str(tmp_path / "out"), "--margin", "1"]) == 2
  assert "--selected and --margin need --partitions" in capsys.readouterr().err
