"""Copies that differ in seed and learning rate train as each would alone."""

import dataclasses
import functools
import types

import chex
import jax
import numpy as np
import optax
import pytest
from flax import nnx

from experiments.mqar import MQAR
from train.cluster import compile_cache, device_mesh
from train.config import Data, Model, Optimizer, Train
from train.step import copies as copies_module
from train.step.copies import Copies
from train.step.model import model_graph
from train.step.optimizer import make_optimizer
from train.step.state import init_state
from train.step.train_step import make_train_step

TASK = MQAR(length=16, pairs=3, vocab_size=40)


def settings(**changes):
  cfg = Train(
    model=Model(
      mixer="lrn",
      channel_mixer="none",
      dim=16,
      num_layers=2,
      num_heads=2,
      vocab_size=300,
      dtype="float32",
    ),
    optimizer=Optimizer(
      peak_lr=1e-3, final_lr=1e-4, warmup_steps=1, weight_decay=0.1, clip_norm=1.0
    ),
    data=Data(folder="-", tokenizer="bytes", train=("x",)),
    run_dir="-",
    seq_len=16,
    global_batch=4,
    steps=8,
    eval_every=1,
    checkpoint_every=1,
  )
  return dataclasses.replace(cfg, **changes)


def test_each_copy_trains_as_the_trainer_does_alone():
  dropout = dataclasses.replace(settings().model, num_layers=1, embedding_dropout=0.1)
  changes = {"peak_lr": 5e-3, "final_lr": 5e-4, "z_loss": 0.1, "logit_penalty": 0.1}
  optimizer = dataclasses.replace(settings().optimizer, **changes)
  cfg = settings(model=dropout, optimizer=optimizer)
  copies = Copies(cfg, seeds=(0, 5, 9), learning_rates=(1e-3, 4e-3, 2e-3))
  batches = [TASK.examples(4, seed) for seed in range(3)]
  losses = [np.asarray(copies.step(batch._asdict())["loss"]) for batch in batches]
  copy = 4  # neither the first nor the last in seed and rate
  seed, rate = copies.runs[copy]
  optimizer = dataclasses.replace(cfg.optimizer, peak_lr=rate, final_lr=rate / 10)
  alone = settings(seed=seed, optimizer=optimizer, model=dropout)
  mesh = device_mesh.make_mesh(alone)
  transform = make_optimizer(alone.optimizer, alone.steps)[0]
  step = make_train_step(alone, model_graph(alone.model), transform, mesh)
  state = init_state(alone, mesh)
  for batch, found in zip(batches, losses, strict=True):
    labels = batch.labels()
    state, metrics = step(
      state,
      {
        "tokens": batch.tokens,
        "targets": np.maximum(labels, 0),
        "weights": (labels >= 0).astype(np.float32),
        "segment_ids": None,
      },
    )
    np.testing.assert_allclose(found[copy], metrics["loss"], rtol=2e-5)
  mine = jax.tree.map(lambda x: np.asarray(x)[copy], copies.params)
  difference = optax.tree.norm(jax.tree.map(np.subtract, mine, state["params"]))
  assert difference < 1e-4 * optax.tree.norm(mine)
  copies.step(batches[0]._asdict(), 0.0)
  still = jax.tree.map(lambda x: np.asarray(x)[copy], copies.params)
  jax.tree.map(np.testing.assert_array_equal, still, mine)


@pytest.mark.slow
def test_restarted_copies_train_as_new_ones_at_a_scaled_rate():
  copies = Copies(settings(), seeds=(0, 1), learning_rates=(1e-3,))
  start = jax.tree.map(np.asarray, copies.params)
  batches = [TASK.examples(4, seed)._asdict() for seed in range(3)]
  losses = [np.asarray(copies.step(batch)["loss"]) for batch in batches]
  copies.restart(start)
  again = [np.asarray(copies.step(batch)["loss"]) for batch in batches]
  np.testing.assert_array_equal(again, losses)
  copies.restart(start)
  still = [np.asarray(copies.step(batch, 0.0)["loss"]) for batch in (*batches[:2], *batches[:2])]
  np.testing.assert_array_equal(still[2:], still[:2])


def test_restart_begins_everything_again():
  zeros, ones = {"w": np.zeros((2, 3), np.float32)}, {"w": np.ones((2, 3), np.float32)}
  of_copies = {"params": ones, "ema": ones, "spikes": ones, "opt_state": None}
  counts = {"step": np.full(2, 5, np.int32), "failures": np.full((2, 2), 3, np.int32)}
  copies = types.SimpleNamespace(cfg=settings(), state=of_copies | counts)
  Copies.restart(copies, jax.tree.map(lambda x: 2 * x, ones))
  twice = {"w": np.full((2, 3), 2, np.float32)}
  want = {"params": twice, "ema": twice, "spikes": zeros}
  want |= {name: np.zeros_like(x) for name, x in counts.items()}
  chex.assert_trees_all_equal({name: copies.state[name] for name in want}, want, strict=True)
  moments = [x for x in jax.tree.leaves(copies.state["opt_state"]) if x.ndim > 1]
  assert moments
  assert not any(x.any() for x in jax.tree.leaves(copies.state["opt_state"]))


@pytest.mark.slow
def test_copies_with_other_seeds_rates_and_folders_share_a_program(monkeypatch):
  traced = []
  make = lambda *of: traced.append(of) or make_optimizer(*of)
  monkeypatch.setattr(copies_module, "make_optimizer", make)
  batch = TASK.examples(4, 0)._asdict()
  for steps, peak, count in ((6, 1e-3, 1), (6, 3e-3, 1), (5, 3e-3, 2)):
    optimizer = dataclasses.replace(settings().optimizer, peak_lr=peak, final_lr=peak / 10)
    cfg = settings(steps=steps, optimizer=optimizer, seed=count, run_dir=f"runs/{peak}")
    Copies(cfg, seeds=(0, 1), learning_rates=(peak,)).step(batch)
    assert len(traced) == count


@functools.partial(jax.jit, static_argnums=0)
def logits_of(graph, params, tokens, segment_ids):
  return nnx.merge(graph, params)(tokens, segment_ids=segment_ids)[0]


def test_scores_are_those_of_the_logits():
  cfg = settings()
  graph, one_document = model_graph(cfg.model), np.zeros((8, 16), np.int32)
  copies = Copies(cfg, seeds=(0, 1), learning_rates=(1e-3,))
  batch = TASK.examples(8, 0)
  right = copies.right(batch._asdict())
  whole = {"tokens": batch.tokens, "targets": batch.tokens}
  assert right.shape == (2,)
  sums = copies.loss(batch._asdict())
  np.testing.assert_array_equal(sums.weight, [24.0, 24.0])
  assert copies.loss(whole).weight[0] == batch.tokens.size
  for copy in range(2):
    params = jax.tree.map(lambda x, copy=copy: np.asarray(x)[copy], copies.params)
    logits = logits_of(graph, params, batch.tokens, one_document)
    logits = np.take_along_axis(np.asarray(logits), batch.positions[..., None], 1)
    assert np.mean(logits.argmax(-1) == batch.targets) == right[copy]
    nats = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), batch.targets[..., None], 2)
    np.testing.assert_allclose(sums.nats[copy], nats.sum(), rtol=1e-5)


def test_losses_of_copies_with_batches_of_their_own_have_weights_and_documents():
  cfg, rng = settings(), np.random.default_rng(0)
  copies = Copies(cfg, seeds=(0, 1), learning_rates=(1e-3,))
  tokens, targets = rng.integers(0, 300, (2, 2, 4, 16)).astype(np.int32)
  segment_ids = np.cumsum(rng.random((2, 4, 16)) < 0.2, axis=-1).astype(np.int32)
  weights = rng.choice([0.0, 0.5, 1.0], (2, 4, 16)).astype(np.float32)
  batch = {"tokens": tokens, "targets": targets, "segment_ids": segment_ids, "weights": weights}
  sums, graph = copies.loss(batch), model_graph(cfg.model)
  for copy in range(2):
    params = jax.tree.map(lambda x, copy=copy: np.asarray(x)[copy], copies.params)
    found = np.asarray(logits_of(graph, params, tokens[copy], segment_ids[copy]), np.float64)
    log_p = found - np.log(np.exp(found).sum(-1, keepdims=True))
    nats = -np.take_along_axis(log_p, targets[copy][..., None], 2)[..., 0]
    np.testing.assert_allclose(sums.nats[copy], (weights[copy] * nats).sum(), rtol=1e-5)
    assert sums.weight[copy] == weights[copy].sum()


@pytest.mark.slow
def test_router_of_copies_learns_by_the_balance_loss():
  """Under "uniform" that is the router's whole gradient."""
  options = {"num_partitions": 3, "lora_rank": 2, "gate_rank": 2, "method": "mask"}
  options |= {"gate": "uniform", "balance": 0.5}
  model = dataclasses.replace(settings().model, mixer="sse", mixer_options=options, num_layers=1)
  optimizer = dataclasses.replace(settings().optimizer, warmup_steps=0, weight_decay=0.0)
  copies = Copies(settings(model=model, optimizer=optimizer), runs=[(0, 1e-3)])
  router = lambda: np.asarray(copies.params["blocks"]["mixer"]["router_proj"]["kernel"])
  before = router()
  (aux,) = copies.step(TASK.examples(4, 0)._asdict())["aux"]
  assert np.abs(router() - before).max() > 1e-5 and aux.loss.shape == (1,)


def test_final_rate_of_a_program_is_in_proportion():
  optimizer = dataclasses.replace(settings().optimizer, peak_lr=4e-3, final_lr=4e-3 * 0.123)
  shared = copies_module.without_run(settings(optimizer=optimizer)).optimizer
  assert shared.final_lr / shared.peak_lr == pytest.approx(0.123, rel=1e-8)


def test_no_copies_raise():
  with pytest.raises(ValueError, match="at least one seed and one learning rate"):
    Copies(settings(), seeds=(), learning_rates=(1e-3,))


def test_choices_of_kernels_are_kept_in_the_folder(tmp_path, monkeypatch):
  folders = []
  monkeypatch.setattr(compile_cache, "options", lambda mesh, kernels: folders.append(kernels))
  Copies(settings(), seeds=(0,), learning_rates=(1e-3,), kernels=tmp_path)
  assert folders == [tmp_path]


# Of several tests, which share the program of three copies with batches of their own.
AVERAGED = dataclasses.replace(settings().optimizer, ema_decay=0.5, warmup_steps=0)
GUARDED = settings(max_skipped=2, optimizer=AVERAGED)


def stacked(batches):
  return jax.tree.map(lambda *xs: np.stack(xs), *batches)


@pytest.mark.slow
def test_copies_average_parameters_after_each_step_and_not_without_targets():
  copies = Copies(GUARDED, seeds=(0, 1, 2), learning_rates=(1e-2,))
  exact = lambda name, copy: np.concatenate(
    [np.ravel(np.float64(x[copy])) for x in jax.tree.leaves(copies.state[name])]
  )
  batch, *_ = poisoned([])
  batch = stacked([batch, batch | {"weights": np.zeros((4, 16), np.float32)}, batch])
  before = [(exact("params", copy), exact("ema", copy)) for copy in (0, 1)]
  metrics = copies.step(batch)
  params, ema = exact("params", 0), exact("ema", 0)
  moved = np.linalg.norm(params - before[0][0])
  assert moved > 1e-3
  assert np.linalg.norm(ema - 0.5 * (before[0][1] + params)) < 1e-2 * moved
  np.testing.assert_array_equal(exact("params", 1), before[1][0])  # no target of it counts
  np.testing.assert_array_equal(exact("ema", 1), before[1][1])
  assert metrics["tokens"].tolist() == [64, 0, 64]
  state = copies.state
  copies.state = state | {"spikes": {"mean": np.ones(3)}}  # as with skip_spikes
  copies.restart(jax.tree.map(lambda x: 2 * x, copies.params))
  np.testing.assert_array_equal(exact("ema", 0), exact("params", 0))
  assert not copies.state["spikes"]["mean"].any()
  copies.state = {name: copies.state[name] for name in state}
  copies.step(batch)


def poisoned(at, steps=6):
  """Batches of text, of which those numbered `at` have a weight that is not finite."""
  rng = np.random.default_rng(0)
  for number in range(steps):
    tokens = rng.integers(0, 257, (4, 17)).astype(np.int32)
    weights = np.ones((4, 16), np.float32)
    weights[0, 3] = np.inf if number in at else 1
    yield {
      "tokens": tokens[:, :-1],
      "targets": tokens[:, 1:],
      "weights": weights,
      "segment_ids": np.zeros((4, 16), np.int32),
    }


def alone(cfg, streams):
  """For each stream the parameters of a run that trains alone, and whether it skipped each step."""
  mesh = device_mesh.make_mesh(cfg)
  transform = make_optimizer(cfg.optimizer, cfg.steps)[0]
  step = make_train_step(cfg, model_graph(cfg.model), transform, mesh)
  for batches in streams:
    state, skipped = init_state(cfg, mesh), []
    for batch in batches:
      state, metrics = step(state, batch)
      skipped.append(float(metrics["skipped"]))
    yield state, skipped


@pytest.mark.slow
@pytest.mark.slow
def test_copy_skips_the_steps_that_it_skips_alone_and_no_other_copy_does():
  streams = [list(poisoned(at)) for at in ([], [1, 3])]
  copies = Copies(GUARDED, runs=[(0, 1e-3), (0, 1e-3), (1, 1e-3)])
  skipped = [
    np.asarray(copies.step(stacked([good, bad, good]))["skipped"])
    for good, bad in zip(*streams, strict=True)
  ]
  for copy, (state, expected) in enumerate(alone(GUARDED, streams)):
    assert [x[copy] for x in skipped] == expected == [float(copy and n in (1, 3)) for n in range(6)]
    mine = jax.tree.map(lambda x, copy=copy: np.asarray(x)[copy], copies.params)
    difference = optax.tree.norm(jax.tree.map(np.subtract, mine, state["params"]))
    assert difference < 1e-4 * optax.tree.norm(mine)
  assert int(copies.state["step"][1]) == 6
  assert not copies.diverged.any()


def test_copy_that_skips_the_most_steps_in_a_row_has_diverged_for_good():
  copies = Copies(GUARDED, runs=[(0, 1e-3), (1, 1e-3), (2, 1e-3)])
  streams = (poisoned([0, 2, 4]), poisoned([1, 2]), poisoned([]))
  for number, batches in enumerate(zip(*streams, strict=True)):
    copies.step(stacked(batches))
    assert copies.diverged.tolist() == [False, number >= 2, False]
  copies.restart(copies.params)
  assert not copies.diverged.any()


def test_steps_without_targets_neither_fail_nor_end_a_row_of_failures():
  copies = Copies(GUARDED, seeds=(0, 1, 2), learning_rates=(1e-3,))
  empty = next(poisoned([])) | {"weights": np.zeros((4, 16), np.float32)}
  (bad,) = poisoned([0], steps=1)
  for batch, expected in (
    (empty, False),
    (empty, False),
    (bad, False),
    (empty, False),
    (bad, True),
  ):
    metrics = copies.step(stacked([batch] * 3))
    assert metrics["skipped"].tolist() == [1] * 3
    assert copies.diverged.tolist() == [expected] * 3
