"""Schedules against their formulas, Adam against a loop in float64, the weight-decay mask."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from lnssm_jax.models import LanguageModel, VisionModel
from train.config import Optimizer
from train.step.model import params_of
from train.step.optimizer import make_optimizer, make_schedule, weight_decay_mask


def test_schedule_exponential_matches_paper():
  schedule = make_schedule(Optimizer(peak_lr=8e-4, final_lr=1e-5), steps=1000)
  for step in (0, 1, 500, 999, 1000, 2000):
    expected = 8e-4 * (1e-5 / 8e-4) ** (min(step, 1000) / 1000)
    assert float(schedule(step)) == pytest.approx(expected, rel=1e-5)


def test_schedule_cosine_after_linear_warmup():
  settings = Optimizer(peak_lr=1e-2, final_lr=1e-3, schedule="cosine", warmup_steps=100)
  schedule = make_schedule(settings, steps=1100)
  assert float(schedule(0)) == 0
  assert float(schedule(50)) == pytest.approx(5e-3)
  for step in (100, 350, 600, 1100):
    share = (step - 100) / 1000
    expected = 1e-3 + 9e-3 * 0.5 * (1 + math.cos(math.pi * share))
    assert float(schedule(step)) == pytest.approx(expected, rel=1e-5)


def test_schedule_exponential_after_warmup_spans_rest():
  settings = Optimizer(peak_lr=1e-2, final_lr=1e-4, warmup_steps=10)
  schedule = make_schedule(settings, steps=110)
  assert float(schedule(5)) == pytest.approx(5e-3)
  assert float(schedule(60)) == pytest.approx(1e-3, rel=1e-5)
  assert float(schedule(110)) == pytest.approx(1e-4, rel=1e-5)


def test_optimizer_update_matches_definition():
  settings = Optimizer(
    peak_lr=1e-2, final_lr=1e-3, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.3, clip_norm=0.5
  )
  steps = 6
  tx, schedule = make_optimizer(settings, steps)
  rng = np.random.default_rng(0)
  params = {"w": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32), "b": jnp.ones(4)}
  state = tx.init(params)
  expected = {k: np.asarray(v, np.float64) for k, v in params.items()}
  m = {k: np.zeros_like(v) for k, v in expected.items()}
  v = {k: np.zeros_like(x) for k, x in expected.items()}
  for step in range(steps):
    gradients = {k: rng.normal(size=x.shape) for k, x in expected.items()}
    updates, state = tx.update(jax.tree.map(jnp.float32, gradients), state, params)
    params = optax.apply_updates(params, updates)
    norm = math.sqrt(sum((g**2).sum() for g in gradients.values()))
    for k, gradient in gradients.items():
      gradient = gradient * min(1, 0.5 / norm)
      m[k] = 0.8 * m[k] + 0.2 * gradient
      v[k] = 0.95 * v[k] + 0.05 * gradient**2
      direction = m[k] / (1 - 0.8 ** (step + 1))
      direction /= np.sqrt(v[k] / (1 - 0.95 ** (step + 1))) + 1e-6
      decay = 0.3 * expected[k] if k == "w" else 0
      expected[k] = expected[k] - float(schedule(step)) * (direction + decay)
  for k, value in expected.items():
    np.testing.assert_allclose(params[k], value, rtol=1e-5, atol=1e-6)


def test_weight_decay_rank_counted_within_layer():
  params = {
    "embedding": jnp.zeros((7, 4)),
    "norm": {"scale": jnp.zeros(4)},
    "blocks": {"kernel": jnp.zeros((3, 4, 4)), "gamma": jnp.zeros((3, 4)), "w": jnp.zeros((3, 4))},
  }
  assert weight_decay_mask(params) == {
    "embedding": True,
    "norm": {"scale": False},
    "blocks": {"kernel": True, "gamma": False, "w": False},
  }


@pytest.mark.parametrize(
  ("mixer", "without"),
  [
    ("mamba", {"a_log", "skip", "bias", "scale"}),
    ("s4d", {"a_log", "a_imag", "c_real", "c_imag", "log_dt", "skip", "bias", "scale"}),
    ("gla", {"bias", "scale"}),
  ],
)
def test_weight_decay_acts_on_matrices_outside_the_recurrence(mixer, without):
  options = {"vocab_size": 11, "dim": 8, "num_layers": 2, "num_heads": 2, "norm": "rms"}
  model = jax.eval_shape(lambda: LanguageModel(mixer=mixer, **options, rngs=nnx.Rngs(0)))
  mask = weight_decay_mask(params_of(model))
  flat, _ = jax.tree_util.tree_flatten_with_path(mask)
  names = {decays: {path[-1].key for path, mark in flat if mark == decays} for decays in (0, 1)}
  assert names[0] == without
  assert names[1] == {"embedding", "kernel"}


def test_weight_decay_leaves_out_the_poles_of_both_directions_of_a_vision_model():
  sizes = {"image_size": 8, "patch_size": 4, "num_classes": 3, "dim": 8, "num_layers": 2}
  model = jax.eval_shape(lambda: VisionModel(**sizes, mixer="mamba", rngs=nnx.Rngs(0)))
  mask = weight_decay_mask(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
  flat, _ = jax.tree_util.tree_flatten_with_path(mask)
  assert {path[-1].key for path, decays in flat if decays} == {"kernel"}
  both = mask["blocks"]["mixer"]
  assert not both["forward"]["a_log"] and not both["backward"]["a_log"]


@pytest.mark.parametrize(
  ("options", "expected"),
  [
    ({"schedule": "linear"}, {5: 0.5, 10: 1, 55: 0.55, 100: 0.1, 200: 0.1}),
    ({"schedule": "constant"}, {5: 0.5, 10: 1, 100: 1, 1000: 1}),
    ({"schedule": "inverse_sqrt"}, {5: 0.5, 10: 1, 40: 0.5, 1000: 0.1}),
    ({"schedule": "wsd"}, {5: 0.5, 10: 1, 91: 1, 100: 0.1}),
    ({"schedule": "wsd", "decay_steps": 40}, {10: 1, 60: 1, 80: 0.55, 100: 0.1, 120: 0.1}),
  ],
  ids=str,
)
def test_schedule_after_warmup_follows_its_formula(options, expected):
  schedule = make_schedule(Optimizer(peak_lr=1, final_lr=0.1, warmup_steps=10, **options), 100)
  for step, rate in expected.items():
    assert float(schedule(step)) == pytest.approx(rate, rel=1e-5), step


def test_optimizer_state_structure_independent_of_options():
  params = {"w": jnp.zeros((2, 2))}

  def paths(**options):
    tx, _ = make_optimizer(Optimizer(peak_lr=1e-3, final_lr=1e-4, **options), 10)
    return [
      jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(tx.init(params))
    ]

  assert paths() == paths(weight_decay=0.1, clip_norm=1.0) == paths(schedule="cosine")
