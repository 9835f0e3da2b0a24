"""Schedules against their formulas, Adam against a loop in float64, the weight-decay mask."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from lnssm_jax.models import LanguageModel, VisionModel
from train.config import ConfigError, Optimizer
from train.step.model import params_of
from train.step.optimizer import make_optimizer, make_schedule, update_ema, weight_decay_mask


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


def tree(seed, layers=2):
  """A model's parameters in small: matrices, a convolution and vectors in layers, an embedding."""
  rng = np.random.default_rng(seed)
  shapes = {
    ("blocks", "up_proj", "kernel"): (layers, 3, 6),
    ("blocks", "down_proj", "kernel"): (layers, 6, 3),
    ("blocks", "k_conv", "kernel"): (layers, 4, 5),
    ("blocks", "up_proj", "bias"): (layers, 6),
    ("embedding",): (7, 3),
  }
  nested = {}
  for path, shape in shapes.items():
    at = nested
    for key in path[:-1]:
      at = at.setdefault(key, {})
    at[path[-1]] = jnp.asarray(rng.normal(size=shape), jnp.float32)
  return nested


def updates_of(params, gradients, **options):
  """The change of `params` by one step."""
  tx, _ = make_optimizer(Optimizer(peak_lr=0.1, final_lr=0.1, schedule="constant", **options), 9)
  return tx.update(gradients, tx.init(params), params)[0]


def test_muon_orthogonalizes_matrices_of_layers_and_leaves_the_rest_to_adam():
  params, gradients = tree(0), tree(1)
  # These coefficients converge to singular values of 1; the usual ones stay near it.
  options = {"ns_steps": 30, "ns_coeffs": [1.5, -0.5, 0.0]}
  got = updates_of(params, gradients, name="muon", options=options)
  adam = updates_of(params, gradients)
  for name in ("up_proj", "down_proj"):
    kernel = got["blocks"][name].pop("kernel")
    for update, gradient in zip(kernel, gradients["blocks"][name]["kernel"], strict=True):
      u, _, v = np.linalg.svd(np.float64(gradient), full_matrices=False)
      np.testing.assert_allclose(update, -0.1 * 0.2 * math.sqrt(6) * u @ v, atol=1e-4)
    del adam["blocks"][name]["kernel"]
  jax.tree.map(np.testing.assert_array_equal, got, adam)


def test_optimizer_by_name_of_a_function_takes_the_place_of_adam():
  params, gradients = tree(0), tree(1)
  got = updates_of(
    params, gradients, name="optax:scale_by_lion", options={"b1": 0.5}, weight_decay=0.3
  )
  decayed = jax.tree.map(
    lambda p, g, decays: -0.1 * (np.sign(g) + 0.3 * p * decays),
    *(params, gradients, weight_decay_mask(params)),
  )
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, decayed)


def test_learning_rate_factors_scale_and_freeze_by_name():
  params, gradients = tree(0), tree(1)
  gradients["embedding"] *= jnp.inf
  factors = {"blocks.up_proj.kernel": 0.5, "embedding": 0.0, "blocks.*": 2.0}
  got = updates_of(params, gradients, weight_decay=0.1, lr_factors=factors)
  usual = updates_of(params, gradients, weight_decay=0.1)
  np.testing.assert_array_equal(got["embedding"], 0)
  got, usual = got["blocks"], usual["blocks"]
  np.testing.assert_allclose(got["up_proj"]["kernel"], 0.5 * usual["up_proj"]["kernel"], rtol=1e-6)
  np.testing.assert_allclose(got["up_proj"]["bias"], 2 * usual["up_proj"]["bias"], rtol=1e-6)
  np.testing.assert_allclose(got["k_conv"]["kernel"], 2 * usual["k_conv"]["kernel"], rtol=1e-6)


def without_its_name():
  return {}["name"]


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"name": "adam"}, "'adam' must be 'adamw', 'muon', or 'MODULE:FUNCTION'"),
    ({"options": {"b1": 0.5}}, "'adamw' has b1, b2 and eps"),
    ({"name": "optax:nothing"}, "has no attribute 'nothing'"),
    ({"name": "no_such_module:f"}, "No module named 'no_such_module'"),
    ({"name": "muon", "options": {"beta7": 1}}, "unexpected keyword argument 'beta7'"),
    ({"name": "math:sqrt"}, "math:sqrt"),
    (
      {"name": f"{__name__}:without_its_name"},
      "cannot be used: KeyError: 'name' (test_optimizer.py",
    ),
    ({"name": "optax:constant_schedule", "options": {"value": 1}}, "it returned function, not an"),
    ({"ema_decay": 1.0}, "ema_decay=1.0 must be between 0 and 1"),
    ({"z_loss": -1e-4}, "z_loss=-0.0001 must be at least 0"),
    ({"lr_factors": {"head": -1}}, "lr_factors['head']=-1.0 must be at least 0"),
    (
      {"lr_factors": {"heads": 1}},
      "no parameter matches 'heads'; there are blocks.down_proj.ker",
    ),
  ],
)
def test_optimizer_that_does_not_exist_rejected(options, message):
  with pytest.raises(ConfigError, match=re.escape(message)):
    updates_of(tree(0), tree(1), **options)


def test_router_biases_move_by_their_rate_whatever_the_gradient_and_others_as_without():
  plain = {"name": "optax:identity", "clip_norm": 1e-3}
  settings = Optimizer(peak_lr=0.5, final_lr=0.1, router_bias_rate=0.25, **plain)
  tx, _ = make_optimizer(settings, 10)
  kernel = {"router": {"kernel": jnp.arange(6.0).reshape(2, 3)}}
  both = kernel | {"router_bias": jnp.zeros((2, 3))}
  load = jnp.array([[0.2, -1e-3, 0.0], [-5.0, 7.0, 1e-9]])
  updates, _ = tx.update(both | {"router_bias": load}, tx.init(both), both)
  alone, _ = tx.update(kernel, tx.init(kernel), kernel)
  assert updates["router_bias"].tolist() == [[-0.25, 0.25, 0.0], [0.25, -0.25, -0.25]]
  of_kernels = (x["router"]["kernel"] for x in (updates, alone))
  np.testing.assert_allclose(*of_kernels, rtol=1e-6)


def test_average_of_parameters_of_16_bits_is_computed_in_float32():
  old, new = {"w": jnp.float32([0.3, 5.0])}, {"w": jnp.bfloat16([1.0, 3.0])}
  got = update_ema(old, new, 0.9)["w"]
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, [0.9 * 0.3 + 0.1 * 1, 0.9 * 5 + 0.1 * 3], rtol=1e-6)
