"""Whole runs in this process: exact resume, validation, divergence, rejected changes."""

import dataclasses
import errno
import json
import os
import random
import re
import signal
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from orbax.checkpoint.experimental.v1._src.saving import execution

from train import trainer
from train.checkpoint import saver
from train.checkpoint.store import StructureError, newest_step
from train.cluster.device_mesh import make_mesh
from train.logging.metric_reader import DivergedError, MetricReader
from train.runs import evaluation
from train.runs.evaluation import Evaluator
from train.runs.run_folder import RunFolder, RunFolderError
from train.step.model import model_graph
from train.step.optimizer import make_schedule

TIMES = ("tokens_per_second", "mfu", "data_wait")  # fields of a row that depend on time


def rows_of(cfg):
  rows = RunFolder(cfg.run_dir).read_rows()
  return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def interrupt(monkeypatch, at):
  """Sends SIGTERM to this process at the given steps."""
  push = MetricReader.push

  def push_and_stop(self, step, metrics):
    if step in at:
      at.remove(step)
      os.kill(os.getpid(), signal.SIGTERM)
    push(self, step, metrics)

  monkeypatch.setattr(MetricReader, "push", push_and_stop)


def fail_first_saves(monkeypatch, failures):
  """Fails a save inside Orbax for each of `failures`: in the call, or in the background."""
  begin = execution._run_blocking_save

  async def begin_or_fail(*arguments, **options):
    failure = failures.pop(0) if failures else None
    written = await begin(*arguments, **options)
    if failure == "in the call":
      await written
      raise OSError(errno.EIO, "Input/output error")

    async def full():
      await written
      raise OSError(errno.ENOSPC, "No space left on device")

    return written if failure is None else full()

  monkeypatch.setattr(saver, "PAUSES", (0, 0, 0))
  monkeypatch.setattr(execution, "_run_blocking_save", begin_or_fail)


def test_resume_after_any_stop_and_failed_save_bit_exact(tiny, tmp_path, monkeypatch, capsys):
  options = {"model__dtype": "bfloat16", "accumulate": 2, "optimizer__clip_norm": 1.0}
  options |= {"model__residual_dropout": 0.1, "model__drop_path": 0.1}
  whole = tiny(run_dir=str(tmp_path / "whole"), **options)
  reference = trainer.fit(whole)
  assert (reference.step, reference.stopped_by) == (12, None)
  parts = tiny(run_dir=str(tmp_path / "parts"), **options)
  stops = sorted(random.Random(5).sample(range(1, 12), 3))
  interrupt(monkeypatch, list(stops))
  failures = []
  fail_first_saves(monkeypatch, failures)
  for stop, failure in zip(stops, ("in the call", "in the background", None), strict=True):
    failures += [failure]
    result = trainer.fit(parts)
    assert (result.step, result.stopped_by) == (stop, "SIGTERM")
    assert newest_step(tmp_path / "parts" / "checkpoints") == stop
  said = capsys.readouterr().out
  assert said.count("Input/output error") == said.count("No space left on device") == 1
  result = trainer.fit(parts)
  assert (result.step, result.stopped_by) == (12, None)
  chex.assert_trees_all_equal(result.state, reference.state, strict=True)
  assert rows_of(parts) == rows_of(whole)
  assert result.validation == reference.validation
  assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # restored


def test_run_outputs_match_readme(tiny, capsys):
  cfg = tiny(log_every=5, sample__tokens=8)
  result = trainer.fit(cfg)
  run = RunFolder(cfg.run_dir)
  rows = run.read_rows()
  train = [row for row in rows if row["kind"] == "train"]
  assert [row["step"] for row in train] == [5, 10, 12]
  fields = {"step", "loss", "learning_rate", "grad_norm", "tokens_per_second", "bits_per_byte"}
  assert all(fields <= row.keys() for row in train)
  assert all(row["tokens_per_second"] > 0 for row in train)
  assert [row["tokens"] for row in train] == [step * 4 * 32 for step in (5, 10, 12)]
  rate = make_schedule(cfg.optimizer, cfg.steps)  # of the step that was just done
  for row in train:
    assert row["learning_rate"] == pytest.approx(float(rate(row["step"] - 1)), rel=1e-6)
  evals = [row for row in rows if row["kind"] == "eval"]
  assert [row["step"] for row in evals] == [0, 6, 12]
  assert evals[0]["bits_per_byte"] == pytest.approx(8, abs=1)
  assert evals[2]["val_loss"] < evals[0]["val_loss"]
  assert result.validation == evals[2:]
  assert sorted(int(p.name) for p in run.checkpoints.iterdir()) == [10, 12]
  out = capsys.readouterr().out
  assert re.search(r"no kernel .* runs? in XLA's form: the default device", out)
  assert "kernels     XLA's forms, because the default device is a cpu" in out
  for text in ("device      cpu x 1", "12/12  loss", "sample", "the ", str(run.metrics_file)):
    assert text in out
  assert f"lnssm-train generate --run-dir {cfg.run_dir}" in out

  rows = run.metrics_file.read_text()
  assert trainer.fit(cfg).step == 12  # nothing is left to do, and nothing is repeated
  assert run.metrics_file.read_text() == rows


def test_validation_loss_is_mean_over_windows(tiny):
  cfg = tiny(global_batch=5)  # leaves a last batch that is not full
  trainer.prepare(cfg.data)
  mesh = make_mesh(cfg)
  graph = model_graph(cfg.model)
  evaluator = Evaluator(cfg, graph, mesh)
  state = trainer.init_state(cfg, mesh)
  (row,) = evaluator(3, state["params"])
  windows = trainer.TokenWindows([f"{cfg.data.folder}/validation"], cfg.seq_len, 257)
  assert len(windows) % 5
  items = [windows[i] for i in range(len(windows))]
  batch = {name: np.stack([item[name] for item in items]) for name in items[0]}

  @jax.jit
  def logits(params, batch):
    return nnx.merge(graph, params)(batch["tokens"], segment_ids=batch["segment_ids"])[0]

  log_p = jax.nn.log_softmax(logits(state["params"], batch))
  nll = -np.take_along_axis(np.asarray(log_p), batch["targets"][..., None], -1)[..., 0]
  weights = batch["weights"].astype(np.float64)
  assert row["val_loss"] == pytest.approx((nll * weights).sum() / weights.sum(), rel=1e-5)
  assert row["tokens"] == weights.sum()
  with open(f"{cfg.data.folder}/validation.json") as file:
    counts = json.load(file)
  expected = row["val_loss"] / np.log(2) * counts["tokens"] / counts["bytes"]
  assert row["bits_per_byte"] == pytest.approx(expected)
  assert evaluator(3, state["params"], should_stop=lambda: True) == []

  lines = []
  with mock.patch.object(evaluation, "_SECONDS_BETWEEN_LINES", -1):
    some = Evaluator(dataclasses.replace(cfg, eval_tokens=6 * cfg.seq_len - 3), graph, mesh)
    (row,) = some(3, state["params"], progress=lines.append)
  assert row["val_loss"] == pytest.approx((nll * weights)[:6].sum() / weights[:6].sum(), rel=1e-5)
  assert row["tokens"] == weights[:6].sum()
  assert lines == ["evaluating validation: 0%", "evaluating validation: 83%"]


def test_evaluation_at_start_left_out(tiny):
  cfg = tiny(eval_at_start=False)
  trainer.fit(cfg)
  assert [row["step"] for row in rows_of(cfg) if row["kind"] == "eval"] == [6, 12]


def poison_metrics(monkeypatch, at, **values):
  """Replaces metrics of step `at`."""
  push = MetricReader.push

  def push_poisoned(self, step, metrics):
    push(self, step, metrics | values if step == at else metrics)

  monkeypatch.setattr(MetricReader, "push", push_poisoned)


def test_divergence_stops_run_and_keeps_checkpoint(tiny, monkeypatch):
  cfg = tiny()
  poison_metrics(monkeypatch, 8, grad_norm=jnp.nan)
  with pytest.raises(DivergedError, match=r"grad_norm is nan at step 8.*optimizer\.peak_lr"):
    trainer.fit(cfg)
  run = RunFolder(cfg.run_dir)
  assert newest_step(run.checkpoints) == 5
  assert max(row["step"] for row in run.read_rows()) == 7


def test_checkpoint_step_checked_before_save(tiny, monkeypatch):
  cfg = tiny()
  poison_metrics(monkeypatch, 10, param_norm=jnp.inf)
  with pytest.raises(DivergedError, match="param_norm is inf at step 10"):
    trainer.fit(cfg)
  assert newest_step(RunFolder(cfg.run_dir).checkpoints) == 5


def test_resume_rows_after_checkpoint_rewritten(tiny, fit_and_kill):
  cfg = tiny()
  run = RunFolder(cfg.run_dir)
  fit_and_kill(cfg, at=9)
  assert max(row["step"] for row in run.read_rows()) == 8
  trainer.fit(cfg)
  steps = [row["step"] for row in run.read_rows() if row["kind"] == "train"]
  assert steps == list(range(1, 13))


def test_resume_mismatch_rejected(tiny, monkeypatch):
  cfg = tiny()
  trainer.fit(cfg)
  run = RunFolder(cfg.run_dir)
  before = run.config_file.read_text(), run.metrics_file.read_text()
  with monkeypatch.context() as patch:
    patch.setattr(jax, "jit", None)  # these raise before anything is compiled
    with pytest.raises(RunFolderError, match=r"model\.dim: the folder's run has 32, this one 64"):
      trainer.fit(tiny(model__dim=64))
    with pytest.raises(RunFolderError, match="cannot be written"):
      trainer.fit(tiny(run_dir="/proc/run"))
  with pytest.raises(StructureError, match=r"params/blocks/\S*: float32\[1, .*needs float32\[2, "):
    trainer.fit(tiny(model__num_layers=2), allow_config_change=True)
  with pytest.raises(ValueError, match="has already done 12 steps, more than steps=11"):
    trainer.fit(tiny(steps=11))
  assert before == (run.config_file.read_text(), run.metrics_file.read_text())


def test_resume_changed_text_rejected(tiny, tmp_path):
  text, first = tmp_path / "train.txt", tmp_path / "first.txt"
  text.write_text("one two three " * 100)
  first.write_text("one two three " * 100)
  sources = {"first": str(first), "train": str(text), "validation": str(text)}
  options = {"data__folder": str(tmp_path / "tokens"), "data__sources": sources}
  options["data__train"] = ("first", "train")
  trainer.fit(tiny(**options))
  text.write_text("three two one " * 100)
  with pytest.raises(ValueError, match=r"the text of train, validation in \S* differs"):
    trainer.fit(tiny(**options, steps=13))
  text.write_text("one two three " * 100)
  assert trainer.fit(tiny(**options)).step == 12


def test_resume_with_more_steps_reported(tiny, capsys):
  trainer.fit(tiny())
  capsys.readouterr()
  result = trainer.fit(tiny(steps=14))
  assert result.step == 14
  out = capsys.readouterr().out
  assert "resuming    after step 12 of 14" in out
  assert "changed     steps: the folder's run has 12, this one 14" in out
  assert RunFolder(tiny().run_dir).load_config().steps == 14
