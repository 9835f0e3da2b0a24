"""Run folders: config, rows, and locks."""

import json
import os
from pathlib import Path

import pytest

from train import trainer
from train.inspection import report
from train.runs import loading, run_folder
from train.runs.run_folder import RunFolder, RunFolderError, claim
from train.step.optimizer import make_schedule


@pytest.fixture
def trained(tiny, monkeypatch):
  """Config of a run folder that appears to have a checkpoint."""
  cfg = tiny()
  with claim(cfg) as run:
    run.write_config(cfg)
  monkeypatch.setattr(run_folder.store, "newest_step", lambda _: 5)
  return cfg


def test_run_folder_config_has_settings_and_versions(tiny):
  cfg = tiny()
  with claim(cfg) as run:
    run.write_config(cfg)
    values = json.loads(run.config_file.read_text())
  assert values["model"]["dim"] == 32
  assert values["steps"] == 12
  assert {"lnssm_jax", "jax", "flax", "git_commit"} <= values["versions"].keys()
  assert values["versions"]["jax"].count(".") >= 2
  assert RunFolder(cfg.run_dir).load_config() == cfg
  assert sorted(os.listdir(cfg.run_dir)) == ["config.json"]


def test_run_folder_changed_settings_listed(trained, tiny):
  options = {
    "model__mixer_options": {"output_gate": "none"},
    "optimizer__peak_lr": 1e-2,
    "steps": 99,
  }
  other = tiny(model__dim=64, **options)
  before = RunFolder(trained.run_dir).config_file.read_text()
  with pytest.raises(RunFolderError) as caught:
    claim(other)
  assert str(caught.value).splitlines() == [
    f"{trained.run_dir} belongs to a run with other settings, by its config.json:",
    "  model.dim: the folder's run has 32, this one 64",
    "  model.mixer_options: the folder's run has {}, this one nothing",
    "  model.mixer_options.output_gate: the folder's run has nothing, this one 'none'",
    "  optimizer.peak_lr: the folder's run has 0.003, this one 0.01",
    "Restore them to resume that run, start a new one with --set run_dir=ANOTHER, or resume"
    " with these settings by --allow-config-change.",
  ]
  assert RunFolder(trained.run_dir).config_file.read_text() == before
  with claim(other, allow_config_change=True) as run:
    assert len(run.changes) == 5


def test_misspelled_mixer_in_the_folder_of_a_run_is_unknown(trained, tiny):
  with pytest.raises(ValueError, match="mixer='lrm' is unknown; did you mean 'lrn'"):
    trainer.fit(tiny(model__mixer="lrm"))


@pytest.mark.parametrize(
  ("task", "fix"), [(None, "fit --run-dir .* --set run_dir="), ({"pairs": 2}, "scores are in .*l")]
)
@pytest.mark.parametrize("read", [loading.load_model, report.report])
def test_run_of_a_sweep_has_no_parameters_to_load(read, task, fix, tiny):
  cfg = tiny()
  with claim(cfg) as run:
    run.write_config(cfg)
    run.append([{"kind": "result", "step": 7, "scores": {}, "task": task}])
  with pytest.raises(FileNotFoundError, match=f"runs of a sweep keep no parameters; .*{fix}"):
    read(cfg.run_dir)
  with pytest.raises(FileNotFoundError, match="runs of a sweep keep no parameters"):
    trainer.fit(cfg)
  assert [row["kind"] for row in RunFolder(cfg.run_dir).read_rows()] == ["result"]


@pytest.mark.parametrize(
  ("name", "value"),
  [("steps", 50), ("accumulate", 2), ("eval_every", 3), ("loss_chunk", 64), ("mesh__fsdp", 2),
   ("model__remat", "full"), ("model__unroll", 2), ("sample__prompt", "b")],
)  # fmt: skip
def test_run_folder_free_settings_may_change(trained, tiny, name, value):
  with claim(tiny(**{name: value})) as run:
    also = ["learning rate"] if name == "steps" else []  # exponential: it spans all steps
    assert list(run.changes) == [name.replace("__", "."), *also]


def test_run_folder_longer_run_says_what_becomes_of_the_learning_rate(trained, tiny):
  before, now = (float(make_schedule(c.optimizer, c.steps)(5)) for c in (trained, tiny(steps=24)))
  assert now > 1.5 * before
  with claim(tiny(steps=24)) as run:
    line = run.changes["learning rate"]
  assert f"of step 5: {before:.3g} with steps={trained.steps}, {now:.3g} with steps=24" in line
  constant = {"optimizer__schedule": "constant"}
  RunFolder(trained.run_dir).write_config(tiny(**constant))
  with claim(tiny(steps=24, **constant)) as run:
    assert list(run.changes) == ["steps"]


def test_run_folder_without_checkpoint_accepts_new_settings(tiny):
  with claim(tiny()) as run:
    run.write_config(tiny())
  with claim(tiny(seed=3)) as run:
    assert run.changes == {}


def test_run_folder_without_config_rejected(trained):
  RunFolder(trained.run_dir).config_file.unlink()
  with pytest.raises(RunFolderError, match=r"has no config\.json"):
    claim(trained)


def test_run_folder_damaged_config_named(trained):
  RunFolder(trained.run_dir).config_file.write_text('{"steps": ')
  with pytest.raises(RunFolderError, match=r"config\.json is damaged"):
    claim(trained)


def test_run_folder_with_a_setting_s_name_changed_is_named(trained):
  file = RunFolder(trained.run_dir).config_file
  file.write_text(file.read_text().replace('"seq_len"', '"seq_lej"'))
  with pytest.raises(RunFolderError, match=r"seq_lej, without seq_len; .*config\.json"):
    claim(trained)


def test_run_folder_locked_against_second_process(tiny):
  cfg = tiny()
  with claim(cfg), pytest.raises(RunFolderError, match="another process is training in"):
    claim(cfg)
  claim(cfg).__exit__()


def test_run_folder_is_file_rejected(tiny, tmp_path):
  path = tmp_path / "file"
  path.write_text("x")
  with pytest.raises(RunFolderError, match="is a file; a run needs its own folder"):
    claim(tiny(run_dir=str(path)))
  with pytest.raises(RunFolderError, match=r"cannot be written \(Not a directory\)"):
    claim(tiny(run_dir=str(path / "below")))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that root cannot write")
def test_run_folder_not_writable_rejected(tiny):
  with pytest.raises(RunFolderError, match=r"'/proc/run' cannot be written .*run_dir=FOLDER"):
    claim(tiny(run_dir="/proc/run"))


def rows_up_to(last):
  return [{"kind": "train", "step": step, "loss": 1.0} for step in range(1, last + 1)]


def test_rows_after_step_removed(tiny):
  with claim(tiny()) as run:
    run.append(rows_up_to(9))
    assert run.keep_rows_until(6) == run.read_rows() == rows_up_to(6)
    run.append([{"kind": "train", "step": 7, "loss": 2.0}])
    assert [row["step"] for row in run.read_rows()] == [1, 2, 3, 4, 5, 6, 7]


def test_rows_incomplete_last_line_ignored(tiny):
  with claim(tiny()) as run:
    run.append(rows_up_to(3))
    with run.metrics_file.open("a") as file:
      file.write('{"kind": "train", "st')
    assert run.read_rows() == rows_up_to(3)
    run.keep_rows_until(2)
    assert run.metrics_file.read_text().count("\n") == 2


def test_rows_damaged_line_rejected(tiny):
  with claim(tiny()) as run:
    run.append(rows_up_to(3))
    run.metrics_file.write_text("x\n" + run.metrics_file.read_text())
    with pytest.raises(RunFolderError, match="line 1, is damaged"):
      run.read_rows()


def test_evaluation_incomplete_not_counted(tiny):
  with claim(tiny()) as run:
    row = lambda step, name: {"kind": "eval", "step": step, "set": name, "val_loss": 1.0}
    run.append([row(5, "a"), row(5, "b"), row(10, "a"), *rows_up_to(10)])
    assert run.evaluation(5, ["b", "a"]) == [row(5, "b"), row(5, "a")]
    assert run.evaluation(10, ["a", "b"]) == []
