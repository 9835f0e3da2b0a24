"""Runs are bound to their model, text and tokenizer; what older versions wrote still loads."""

import dataclasses
import gc
import json
import logging
import re
import shutil
import sys
from pathlib import Path

import pytest

from train import config, trainer
from train.checkpoint import store, verify
from train.data import DataError
from train.data.tokenizers import bpe_path
from train.logging.metric_reader import MetricReader
from train.runs import bindings, evaluation, export, loading
from train.runs.bindings import BindingError
from train.runs.run_folder import RunFolder, RunFolderError


@pytest.fixture
def trained(tiny, tmp_path):
  """Config of a finished run with a trained tokenizer."""
  cfg = tiny(
    data__folder=str(tmp_path / "tokens"), data__tokenizer="bpe:260", model__vocab_size=260, steps=6
  )
  trainer.fit(cfg)
  return cfg


def rewrite(path, change):
  """Replaces the JSON of a file by `change` of it."""
  path.write_text(json.dumps(change(json.loads(path.read_text()))))


def test_changed_model_of_equal_shapes_neither_evaluated_nor_exported(trained, tmp_path, capsys):
  run = RunFolder(trained.run_dir)
  rewrite(run.config_file, lambda c: c | {"model": c["model"] | {"num_heads": 4}})
  cfg = run.load_config()
  message = "model.num_heads: trained with 2, these settings have 4"
  with pytest.raises(BindingError, match=message):
    evaluation.run(cfg)
  with pytest.raises(BindingError, match=message):
    export.export_run(run.path, tmp_path / "exported")
  assert not (tmp_path / "exported").exists()
  with pytest.raises(BindingError, match=message):
    loading.load_model(run.path)
  with pytest.raises(BindingError, match=message):
    trainer.fit(cfg)
  rewrite(run.config_file, lambda c: c | {"model": c["model"] | {"num_heads": 2, "unroll": 1}})
  evaluation.run(run.load_config())  # the same function
  assert "warning: " not in capsys.readouterr().err
  rewrite(run.config_file, lambda c: c | {"seq_len": 16, "model": c["model"] | {"unroll": 1}})
  loading.load_model(run.path)
  line = capsys.readouterr().err
  assert line.startswith(f"warning: {run.config_file} has changed since step 6 was saved, and is")
  assert "seq_len=16, saved with 32" in line


def test_changed_tokenizer_rejected_before_files_are_made(trained, tmp_path):
  path = bpe_path(trained.data.folder)
  path.write_text(path.read_text() + " ")
  contents = lambda: {p.name: p.read_bytes() for p in path.parent.iterdir()}
  before = contents()
  for use in (
    lambda: trainer.fit(trained),
    lambda: evaluation.run(trained),
    lambda: loading.load_model(trained.run_dir).tokenizer,
    lambda: export.export_run(trained.run_dir, tmp_path / "exported"),
  ):
    with pytest.raises(BindingError, match=re.escape(f"'bpe:260' ({path}) is not the")):
      use()
  assert contents() == before
  assert loading.load_model(trained.run_dir).step == 6  # a model is useful without one


@pytest.mark.slow
def test_checkpoint_without_newer_fields_still_loads(trained, tmp_path):
  """As written before fingerprints of blocks and of the tokenizer were stored."""
  directory = RunFolder(trained.run_dir).checkpoints
  sets = {"train": json.loads((Path(trained.data.folder) / "train.json").read_text())}
  now = bindings.inputs(trained.data, sets)
  stored = store.newest_metadata(directory)
  assert (stored["tokenizer"], stored["data"]["train"]) == (now["tokenizer"], now["data"]["train"])
  digest = sets["train"]["sha256"]
  assert bindings.changed_sets({"train": digest}, now["data"]) == []
  assert bindings.changed_sets({"train": digest[::-1]}, now["data"]) == ["train"]
  assert bindings.changed_sets({"train": None}, now["data"]) == ["train"]
  bindings.checked_tokenizer({}, trained.data)
  bindings.check_model({}, trained.model, "x")
  model = config.to_dict(trained.model)
  del model["unroll"], model["residual_dropout"]
  bindings.check_model({"config": {"model": model}}, trained.model, "x")


def test_sets_are_compared_by_sample_and_digest():
  one = {"a": {"sha256": "x", "sample": "y"}}
  changed = lambda **now: bindings.changed_sets(one, {"a": {"sha256": "x", "sample": "y"} | now})
  assert changed() == changed(sha256=None) == []
  assert changed(sample="z") == changed(sha256="z") == ["a"]


def test_metadata_of_no_or_damaged_checkpoint_empty(tmp_path):
  assert store.newest_metadata(tmp_path) == {}
  (tmp_path / "5").mkdir()
  (tmp_path / "5" / "_CHECKPOINT_METADATA").write_text("{")
  assert store.newest_metadata(tmp_path) == {}


def test_metadata_of_a_damaged_checkpoint_logs_nothing(trained, tmp_path, monkeypatch, caplog):
  shutil.copytree(RunFolder(trained.run_dir).checkpoints / "6", tmp_path / "6")
  manifest = tmp_path / "6" / "optimizer" / "manifest.ocdbt"
  manifest.write_bytes(manifest.read_bytes()[:20])
  monkeypatch.setattr(logging.getLogger("absl"), "filters", [])  # those of earlier tests
  monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
  store._silence_orbax.cache_clear()
  store.newest_metadata(tmp_path)
  gc.collect(0)  # asyncio logs a task whose error nobody asked for when it is collected
  assert caplog.records == []


@pytest.mark.slow
def test_checkpoint_and_rows_of_another_run_rejected(trained, tmp_path):
  run, other = RunFolder(trained.run_dir), RunFolder(tmp_path / "other")
  trainer.fit(dataclasses.replace(trained, run_dir=str(other.path)))  # the same numbers
  rows = run.metrics_file.read_text()
  shutil.rmtree(run.checkpoints / "6")
  shutil.copytree(other.checkpoints / "6", run.checkpoints / "6")
  lines, whole = verify.report(run.checkpoints)
  assert not whole and lines[-1] == "step 6  DAMAGED: its files belong to another run"
  assert loading.load_model(run.path).step == 5
  run.metrics_file.write_text(other.metrics_file.read_text())
  with pytest.raises(RunFolderError, match=r"line 1, is damaged \(a row of another run\)"):
    run.read_rows()
  # Older versions wrote no id, into neither.
  run.metrics_file.write_text(re.sub(r', "run": "\w+"', "", rows))
  rewrite(run.config_file, lambda c: {name: x for name, x in c.items() if name != "run"})
  assert loading.load_model(run.path).step == 6
  trainer.fit(dataclasses.replace(trained, steps=7), allow_config_change=True)
  assert verify.report(run.checkpoints)[0][-1].startswith("step 7  intact")
  assert '"run": ' in run.metrics_file.read_text().splitlines()[-1]


def test_text_changed_during_training_never_in_a_checkpoint(tiny, tmp_path, monkeypatch):
  cfg = tiny(data__folder=str(tmp_path / "tokens"))
  path, push = tmp_path / "tokens" / "train.bin", MetricReader.push

  def push_and_flip(self, step, metrics):
    if step == 7:
      with path.open("r+b") as file:
        file.write(bytes([file.read(1)[0] ^ 1]))  # the second byte, from the first
    push(self, step, metrics)

  with monkeypatch.context() as patch:
    patch.setattr(MetricReader, "push", push_and_flip)
    # Before it is saved, or by who reads that block of the file next.
    with pytest.raises((BindingError, DataError), match=r"train.* has changed (during|since)"):
      trainer.fit(cfg)
  assert store.newest_step(RunFolder(cfg.run_dir).checkpoints) == 5
  path.unlink()  # it is created again from its source
  assert trainer.fit(cfg).step == 12


def test_run_that_loses_rows_says_how_many(tiny, fit_and_kill, capsys):
  cfg = tiny()
  for at in (7, 11):  # with checkpoints of step 5 and 10
    fit_and_kill(cfg, at=at)
  assert "are lost" not in capsys.readouterr().out
  metrics = RunFolder(cfg.run_dir).metrics_file
  metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[2:]))
  trainer.fit(cfg)
  assert "metrics.jsonl has 10 rows up to step 10, of 12: the others are lost" in (
    capsys.readouterr().out
  )
