"""Skipped steps: non-finite ones and spikes, their effect, and when a run stops."""

import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train import trainer
from train.checkpoint.store import newest_step
from train.cluster import device_mesh
from train.logging.metric_reader import DivergedError
from train.runs.run_folder import RunFolder, RunFolderError
from train.step import step_guard
from train.step.model import model_graph
from train.step.optimizer import make_optimizer
from train.step.train_step import make_train_step


def quick(tiny, **changes):
  """Config of a run without validation and generation, for fewer compilations."""
  sources = {"train": tiny().data.sources["train"]}
  return tiny(data__validation=(), data__sources=sources, **changes)


def poison(monkeypatch, values):
  """Sets the weights of whole training batches to {step: value}."""
  train_batches = trainer.train_batches

  def poisoned(windows, **options):
    for step, batch in enumerate(train_batches(windows, **options), options["start"] + 1):
      if step in values:
        batch = batch | {"weights": np.full_like(batch["weights"], values[step])}
      yield batch

  monkeypatch.setattr(trainer, "train_batches", poisoned)


def rows_of(cfg):
  rows = RunFolder(cfg.run_dir).read_rows()
  return [
    {k: v for k, v in row.items() if k not in ("tokens_per_second", "mfu", "data_wait")}
    for row in rows
  ]


def test_step_guard_skipped_step_changes_only_schedule(tiny):
  cfg = tiny(skip_spikes=6.0)
  mesh = device_mesh.make_mesh(cfg)
  tx, _ = make_optimizer(cfg.optimizer, cfg.steps)
  step = make_train_step(cfg, model_graph(cfg.model), tx, mesh)
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 257, (cfg.global_batch, cfg.seq_len + 1)).astype(np.int32)
  batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
  batch |= {"segment_ids": np.zeros_like(tokens[:, 1:]), "weights": np.ones((4, 32), np.float32)}
  place = lambda batch: jax.device_put(batch, device_mesh.batch_sharding(mesh))
  state, metrics = step(trainer.init_state(cfg, mesh), place(batch))
  assert metrics["skipped"] == 0
  before = jax.device_get(state)
  lowest = np.float32([0, 0])
  enough = before["spikes"] | {
    "mean": lowest,
    "variance": lowest,
    "count": np.int32(step_guard.HISTORY),
  }
  head = before["params"]["head"]["kernel"]
  huge = before["params"] | {"head": {"kernel": 1e30 * head}}  # its gradients overflow
  for weight, change in (
    (np.nan, {}),
    (0, {}),  # no target counts
    (0, {"spikes": enough}),
    (np.inf, {}),
    (1, {"spikes": enough}),
    (1, {"params": huge}),
  ):
    spikes = change.get("spikes", before["spikes"])
    bad = batch | {"weights": np.full_like(batch["weights"], weight)}
    start = before | change
    after, metrics = jax.device_get(step(jax.device_put(start), place(bad)))
    assert metrics["skipped"] == 1
    if "params" in change:
      assert np.isfinite(metrics["loss"]) and not np.isfinite(metrics["grad_norm"])
      chex.assert_trees_all_equal(after["params"], huge, strict=True)
      chex.assert_trees_all_equal(after["opt_state"][1], before["opt_state"][1], strict=True)
      continue
    assert np.isfinite(metrics["param_norm"])
    chex.assert_trees_all_equal(after["params"], before["params"], strict=True)
    chex.assert_trees_all_equal(after["opt_state"][1], before["opt_state"][1], strict=True)
    chex.assert_trees_all_equal(after["spikes"], spikes, strict=True)
    assert after["step"] == before["step"] + 1
    assert after["opt_state"][-1].count == before["opt_state"][-1].count + 1
  after, metrics = jax.device_get(step(jax.device_put(before), place(batch)))
  assert metrics["skipped"] == 0
  assert after["spikes"]["count"] == 2
  assert not np.array_equal(after["params"]["head"]["kernel"], before["params"]["head"]["kernel"])


@pytest.mark.slow
def test_step_guard_run_with_skipped_steps_resumes_exactly(
  tiny, tmp_path, monkeypatch, capsys, fit_and_kill
):
  poison(monkeypatch, {4: np.nan, 5: np.inf, 9: np.nan})
  changes = {"optimizer__ema_decay": 0.75, "accumulate": 2}
  whole = quick(tiny, run_dir=str(tmp_path / "whole"), **changes)
  reference = trainer.fit(whole)
  out = capsys.readouterr().out
  assert "step 4 skipped (loss is nan, grad_norm is nan); 1 in total" in out
  assert [row["step"] for row in rows_of(whole) if row["kind"] == "skipped"] == [4, 5, 9]
  assert [row["skipped"] for row in rows_of(whole) if row["kind"] == "train"] == [
    *(0, 0, 0), *(2, 2, 2), *(3, 3, 3),
  ]  # fmt: skip
  losses = [row["loss"] for row in rows_of(whole) if row["kind"] == "train"]
  assert np.isfinite(losses).all()

  parts = quick(tiny, run_dir=str(tmp_path / "parts"), **changes)
  fit_and_kill(parts, at=8)
  chex.assert_trees_all_equal(trainer.fit(parts).state, reference.state, strict=True)
  assert rows_of(parts) == rows_of(whole)


def test_average_of_an_existing_run_begins_with_the_parameters_of_its_checkpoint(tiny, capsys):
  before = jax.device_get(trainer.fit(quick(tiny)).state["params"])
  changes = {"optimizer__ema_decay": 0.75, "steps": 13}
  state = trainer.fit(quick(tiny, **changes)).state
  assert "the average of the parameters begins with those of step 12" in capsys.readouterr().out
  assert not np.array_equal(before["head"]["kernel"], state["params"]["head"]["kernel"])
  expected = jax.tree.map(lambda old, new: 0.75 * old + 0.25 * new, before, state["params"])
  chex.assert_trees_all_close(state["ema"], expected, rtol=1e-6, atol=1e-8)
  with pytest.raises(RunFolderError, match=r"optimizer\.ema_decay: .* has 0\.75, this one"):
    trainer.fit(quick(tiny, steps=14))


def test_step_guard_steps_without_targets_are_skipped_and_no_failures(
  tiny, tmp_path, monkeypatch, capsys, fit_and_kill
):
  poison(monkeypatch, dict.fromkeys((3, 5, 6, 7), 0) | {4: np.nan, 8: np.nan})
  cfg = quick(tiny, max_skipped=3, run_dir=str(tmp_path / "whole"))
  trainer.fit(cfg)
  assert "step 5 skipped (no target of its batch counts); 3 in total" in capsys.readouterr().out
  rows = {row["step"]: row for row in rows_of(cfg)}
  assert [step for step, row in rows.items() if row["kind"] == "skipped"] == [3, 4, 5, 6, 7, 8]
  assert (rows[5]["loss"], rows[5]["grad_norm"]) == (None, None)
  poison(monkeypatch, {9: np.nan})
  limited = quick(tiny, max_skipped=3, run_dir=str(tmp_path / "limited"))
  fit_and_kill(limited, at=7)  # what was counted before a resume counts
  with pytest.raises(DivergedError, match=r"the last 3 steps with targets, up to 9, were skipped"):
    trainer.fit(limited)


def test_skip_spikes_switched_on_for_a_run_that_exists(tiny, fit_and_kill):
  fit_and_kill(quick(tiny), at=6)  # its checkpoint is of step 5
  state = trainer.fit(quick(tiny, skip_spikes=6.0), allow_config_change=True).state
  assert (state["step"], state["spikes"]["count"]) == (12, 7)


def test_step_guard_initial_statistics_share_no_buffer():
  leaves = jax.tree.leaves(step_guard.init_statistics())
  assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_step_guard_too_many_skipped_steps_end_run(tiny, monkeypatch):
  poison(monkeypatch, dict.fromkeys(range(7, 13), np.nan))
  cfg = quick(tiny, checkpoint_every=6, max_skipped=3)
  with pytest.raises(DivergedError, match=r"the last 3 steps, up to 9, were skipped"):
    trainer.fit(cfg)
  folder = RunFolder(cfg.run_dir).checkpoints
  abstract = trainer.abstract_state(cfg, device_mesh.make_mesh(cfg))
  with trainer.Checkpoints(folder, keep=2) as checkpoints:
    last, metadata = checkpoints.restore(abstract)
    assert metadata["data_position"] == last["step"] == newest_step(folder) >= 9
    shutil.rmtree(folder / str(last["step"]))
    good, _ = checkpoints.restore(abstract)
  assert good["step"] == 6
  chex.assert_trees_all_equal(last["params"], good["params"], strict=True)
  chex.assert_trees_all_equal(last["opt_state"][1], good["opt_state"][1], strict=True)


def test_step_guard_statistics_match_definition(monkeypatch):
  monkeypatch.setattr(step_guard, "HISTORY", 8)
  rng = np.random.default_rng(0)
  values = rng.normal((3, 10), 1, (40, 2))
  seen = step_guard.init_statistics()
  mean, variance = np.zeros(2), np.zeros(2)
  for n, x in enumerate(values, 1):
    seen = step_guard.update_statistics(seen, jnp.float32(x[0]), jnp.float32(x[1]))
    w = 1 / min(n, 8)
    mean, variance = mean + w * (x - mean), (1 - w) * (variance + w * (x - mean) ** 2)
    if n == 8:
      np.testing.assert_allclose(mean, values[:8].mean(0), rtol=1e-12)
      np.testing.assert_allclose(variance, values[:8].var(0), rtol=1e-12)
  np.testing.assert_allclose(seen["mean"], mean, rtol=1e-5)
  np.testing.assert_allclose(seen["variance"], variance, rtol=1e-5)
  edge = mean + 3 * np.sqrt(variance)
  for by, expected in (((-0.01, -0.01), False), ((0.01, -9), True), ((-9, 0.01), True)):
    loss, grad_norm = jnp.float32(edge + np.array(by))
    assert step_guard.is_spike(seen, loss, grad_norm, 3.0) == expected
  few = seen | {"count": jnp.int32(7)}
  assert not step_guard.is_spike(few, jnp.float32(99), jnp.float32(99), 3.0)


def test_step_without_targets_neither_counts_as_a_failure_nor_ends_a_row_of_them():
  count = lambda tokens, skipped: step_guard.count_failures(
    jnp.array([2, 4]), {"tokens": jnp.float32(tokens), "skipped": jnp.int32(skipped)}
  )
  assert [count(*step).tolist() for step in ((0, 1), (8, 1), (8, 0))] == [[2, 4], [3, 4], [0, 4]]
