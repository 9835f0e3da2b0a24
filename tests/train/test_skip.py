"""Steps that are left out: not finite, or spikes; what they change, and when a run gives up."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train import loop, skip
from train import mesh as meshes
from train.checkpoint import newest_step
from train.optimizer import make_optimizer
from train.recorder import DivergedError
from train.run_folder import RunFolder
from train.step import init_state, make_train_step, model_graph


def quick(tiny, **changes):
  """A run that neither validates nor generates, so that little is compiled."""
  sources = {"train": tiny().data.sources["train"]}
  return tiny(data__validation=(), data__sources=sources, sample__tokens=0, **changes)


def poison(monkeypatch, values):
  """The weights of whole training batches become {step: value}."""
  train_batches = loop.train_batches

  def poisoned(windows, **options):
    for step, batch in enumerate(train_batches(windows, **options), options["start"] + 1):
      if step in values:
        batch = batch | {"weights": np.full_like(batch["weights"], values[step])}
      yield batch

  monkeypatch.setattr(loop, "train_batches", poisoned)


def rows_of(cfg):
  rows = RunFolder(cfg.run_dir).read_rows()
  return [
    {k: v for k, v in row.items() if k not in ("tokens_per_second", "mfu", "data_wait")}
    for row in rows
  ]


def assert_same_bits(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_a_step_that_is_left_out_changes_only_the_schedule(tiny):
  cfg = tiny(skip_spikes=6.0)
  mesh = meshes.make_mesh(cfg)
  tx, _ = make_optimizer(cfg.optimizer, cfg.steps)
  step = make_train_step(cfg, model_graph(cfg.model), tx, mesh)
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 257, (cfg.global_batch, cfg.seq_len + 1)).astype(np.int32)
  batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
  batch |= {"segment_ids": np.zeros_like(tokens[:, 1:]), "weights": np.ones((4, 32), np.float32)}
  place = lambda batch: jax.device_put(batch, meshes.batch_sharding(mesh))
  state, metrics = step(init_state(cfg, mesh), place(batch))
  assert metrics["skipped"] == 0
  before = jax.device_get(state)
  lowest = np.float32([0, 0])
  enough = before["spikes"] | {"mean": lowest, "variance": lowest, "count": np.int32(skip.HISTORY)}
  for weight, spikes in ((np.nan, before["spikes"]), (np.inf, before["spikes"]), (1, enough)):
    bad = batch | {"weights": np.full_like(batch["weights"], weight)}
    after, metrics = jax.device_get(step(jax.device_put(before | {"spikes": spikes}), place(bad)))
    assert metrics["skipped"] == 1
    assert np.isfinite(metrics["param_norm"])
    assert_same_bits(after["params"], before["params"])
    assert_same_bits(after["opt_state"][1], before["opt_state"][1])
    assert_same_bits(after["spikes"], spikes)
    assert after["step"] == before["step"] + 1
    assert after["opt_state"][-1].count == before["opt_state"][-1].count + 1
  after, metrics = jax.device_get(step(jax.device_put(before), place(batch)))
  assert metrics["skipped"] == 0
  assert after["spikes"]["count"] == 2
  assert not np.array_equal(after["params"]["head"]["kernel"], before["params"]["head"]["kernel"])


def test_a_run_goes_on_past_bad_steps_and_resumes_exactly(
  tiny, tmp_path, monkeypatch, capsys, fit_and_kill
):
  poison(monkeypatch, {4: np.nan, 5: np.inf, 9: np.nan})
  whole = quick(tiny, run_dir=str(tmp_path / "whole"))
  reference = loop.fit(whole)
  out = capsys.readouterr().out
  assert "step 4 left out (loss is nan, grad_norm is nan); 1 in all" in out
  assert [row["step"] for row in rows_of(whole) if row["kind"] == "skipped"] == [4, 5, 9]
  assert [row["skipped"] for row in rows_of(whole) if row["kind"] == "train"] == [
    *(0, 0, 0), *(2, 2, 2), *(3, 3, 3),
  ]  # fmt: skip
  losses = [row["loss"] for row in rows_of(whole) if row["kind"] == "train"]
  assert np.isfinite(losses).all()

  parts = quick(tiny, run_dir=str(tmp_path / "parts"))
  fit_and_kill(parts, at=8)
  assert_same_bits(loop.fit(parts).state, reference.state)
  assert rows_of(parts) == rows_of(whole)


def test_too_many_in_a_row_end_the_run_with_the_last_good_weights(tiny, monkeypatch):
  poison(monkeypatch, dict.fromkeys(range(7, 13), np.nan))
  cfg = quick(tiny, checkpoint_every=6, max_skipped=3)
  with pytest.raises(DivergedError, match=r"the last 3 steps, up to 9, were left out"):
    loop.fit(cfg)
  folder = RunFolder(cfg.run_dir).checkpoints
  abstract = loop.abstract_state(cfg, meshes.make_mesh(cfg))
  with loop.Checkpoints(folder, keep=2) as checkpoints:
    last, metadata = checkpoints.restore(abstract)
    assert metadata["data_position"] == last["step"] == newest_step(folder) >= 9
    shutil.rmtree(folder / str(last["step"]))
    good, _ = checkpoints.restore(abstract)
  assert good["step"] == 6
  assert_same_bits(last["params"], good["params"])
  assert_same_bits(last["opt_state"][1], good["opt_state"][1])


def test_statistics_are_a_mean_and_then_an_exponential_one(monkeypatch):
  monkeypatch.setattr(skip, "HISTORY", 8)
  rng = np.random.default_rng(0)
  values = rng.normal((3, 10), 1, (40, 2))
  seen = skip.start()
  mean, variance = np.zeros(2), np.zeros(2)
  for n, x in enumerate(values, 1):
    seen = skip.watch(seen, jnp.float32(x[0]), jnp.float32(x[1]))
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
    assert skip.is_spike(seen, loss, grad_norm, 3.0) == expected
  few = seen | {"count": jnp.int32(7)}
  assert not skip.is_spike(few, jnp.float32(99), jnp.float32(99), 3.0)
