"""LoRA: the same factors as when they are trained themselves; nothing else moves."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lnssm_jax.models.settings import abstract_params
from lnssm_jax.pretrained.exports import flat
from tests.train.test_train_step import make_batch, run
from train.cli import dry_run
from train.cluster import device_mesh
from train.config import ConfigError, Optimizer, to_dict
from train.step.optimizer import make_optimizer
from train.step.state import init_state

KERNEL = "blocks.mixer.q_proj.kernel"
OPTIONS = {"peak_lr": 0.05, "final_lr": 0.01, "clip_norm": 1.0, "weight_decay": 0.1}


def parameters():
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape))
  mixer = {"q_proj": {"kernel": normal(2, 5, 7), "bias": normal(2, 7)}}
  return {"blocks": {"mixer": mixer}, "embedding": normal(11, 5)}


MOMENTUM = {"name": "optax:trace", "options": {"decay": 0.5}, "peak_lr": 1e-3, "final_lr": 1e-4}


@pytest.mark.parametrize("options", [OPTIONS, MOMENTUM], ids=["adamw", "momentum"])
def test_lora_equals_training_the_factors(options):
  """Four steps in float64 on a loss that is not quadratic; Adam does not see a gradient's scale."""
  with jax.enable_x64(True):
    tx, _ = make_optimizer(Optimizer(**options, lora_rank=3, lora_alpha=12.0), 10, seed=5)
    plain, _ = make_optimizer(Optimizer(**options), 10)
    params = first = parameters()
    kernel = lambda p: p["blocks"]["mixer"]["q_proj"]["kernel"]
    loss = lambda p: jnp.sum(jnp.sin(3 * kernel(p)) + kernel(p) ** 2) + jnp.sum(p["embedding"])

    state = jax.tree.map(
      lambda x: x.astype(float) if x.dtype == jnp.float32 else x, tx.init(params)
    )
    (tree, *_) = state
    factors = tree["blocks"]["mixer"]["q_proj"]["kernel"]
    assert factors["lora_a"].shape == (2, 5, 3) and factors["lora_b"].shape == (2, 3, 7)
    assert not factors["lora_b"].any()
    merged = lambda f: kernel(first) + 4.0 * f["kernel"]["lora_a"] @ f["kernel"]["lora_b"]
    with_kernel = lambda x: first | {"blocks": {"mixer": {"q_proj": {"kernel": x}}}}
    own = {"kernel": factors}
    own_state = jax.tree.map(
      lambda x: x.astype(float) if x.dtype == jnp.float32 else x, plain.init(own)
    )
    for _ in range(4):
      updates, state = tx.update(jax.grad(loss)(params), state, params)
      params = optax.apply_updates(params, updates)
      gradients = jax.grad(lambda f: loss(with_kernel(merged(f))))(own)
      changes, own_state = plain.update(gradients, own_state, own)
      own = optax.apply_updates(own, changes)
    np.testing.assert_allclose(kernel(params), merged(own), rtol=1e-12)
    assert np.abs(kernel(params) - kernel(first)).max() > 0.01
    got = flat(params)
    for name, x in flat(first).items():
      assert name == KERNEL or np.array_equal(x, got[name]), name


def test_lora_begins_with_factors_of_its_seed_apart_for_each_matrix():
  """A is normal with variance 1 / in, of 128 and 512; B is zero."""
  kernels = {f"{name}_proj": {"kernel": jnp.zeros((2, rows, 4))} for name, rows in
             (("q", 128), ("k", 128), ("v", 512), ("Q", 64))}  # fmt: skip

  def begun(seed, **names):
    settings = Optimizer(**OPTIONS, lora_rank=16, **names)
    factors, *_ = make_optimizer(settings, 10, seed)[0].init({"blocks": {"mixer": kernels}})
    return flat(factors)

  first, other = begun(1), begun(2)
  a = {name: np.asarray(x) for name, x in first.items() if name.endswith("lora_a")}
  for name, x in a.items():
    assert x.std() * x.shape[1] ** 0.5 == pytest.approx(1, abs=0.05), name
    assert not np.array_equal(x, other[name]) and not np.array_equal(x[0], x[1])
  q, k, _ = (a[f"blocks.mixer.{name}_proj.kernel.lora_a"] for name in "qkv")
  assert not np.array_equal(q, k)
  assert not any(x.any() for name, x in first.items() if name not in a)
  some = begun(1, lora_names=("*.q_proj.kernel", "*.v_proj.kernel"))
  assert {name.split(".")[2] for name in some} == {"q_proj", "v_proj"}


@pytest.mark.slow
def test_lora_trains_named_matrices_of_a_model(tiny):
  """Through the compiled step: the sum is W_0 + A B, and only factors have moments."""
  options = {"optimizer__lora_rank": 2, "optimizer__lora_names": ("*q_proj.kernel", "*up.kernel")}
  cfg = tiny(model__mixer="gla", model__channel_mixer="swiglu", **options)
  state, _ = run(cfg, make_batch(cfg), steps=2)
  before = flat(jax.device_get(init_state(cfg, device_mesh.make_mesh(cfg))["params"]))
  factors, *inner = state["opt_state"]
  pairs = flat(factors)
  changed = {
    name for name, x in flat(state["params"]).items() if not np.array_equal(x, before[name])
  }
  assert changed == {name.rsplit(".", 1)[0] for name in pairs}
  assert len(changed) == 2
  for name in changed:
    want = before[name] + pairs[f"{name}.lora_a"] @ pairs[f"{name}.lora_b"]
    np.testing.assert_allclose(flat(state["params"])[name], want, rtol=1e-5, atol=1e-7)
  moments = sum(x.size for x in jax.tree.leaves(inner) if x.ndim)
  assert moments == 2 * sum(x.size for x in pairs.values())


@pytest.mark.parametrize(
  ("channel_mixer", "message"),
  [
    ("swiglu", "^adapter     by --layout peft$"),
    ("moe", "^no adapter  by --layout peft: no model of layout"),
  ],
)
def test_dry_run_says_before_a_run_whether_peft_has_its_matrices(channel_mixer, message, tiny):
  names = ("*_proj.kernel", "*.down.kernel")
  kind = {"model__mixer": "softmax_attention", "model__channel_mixer": channel_mixer}
  kind |= {"model__mixer_options": {"positions": "rotary"}, "model__embedding_norm": False}
  cfg = tiny(optimizer__lora_rank=2, optimizer__lora_names=names, model__norm="rms", **kind)
  params = abstract_params(to_dict(cfg.model))
  assert re.search(message, dry_run._adapter(cfg, params))


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"lora_alpha": 2.0}, "lora_alpha=2.0 belongs to LoRA; give optimizer.lora_rank"),
    ({"lora_rank": 0}, "lora_rank=0"),
    ({"lora_rank": 2, "lora_alpha": 0.0}, "lora_alpha=0.0 must be positive"),
    ({"lora_rank": 2, "name": "muon"}, "goes with neither optimizer.name='muon'"),
    ({"lora_rank": 2, "lr_factors": {"embedding": 0.0}}, "nor optimizer.lr_factors"),
    ({"lora_rank": 2, "lora_names": ("mixer.*",)}, "no parameter matches 'mixer.*'; there are b"),
    ({"lora_rank": 2, "lora_names": ("*_proj.*",)}, r"matches blocks\S*bias of shape \(2, 7\)"),
  ],
)
def test_lora_bad_settings_raise(options, message):
  with pytest.raises(ConfigError, match=message):
    make_optimizer(Optimizer(**OPTIONS | options), 10)[0].init(parameters())


def test_lora_with_bfloat16_parameters_raises(tiny):
  with pytest.raises(ConfigError, match="lora_rank=2 adds small numbers to model"):
    tiny(optimizer__lora_rank=2, model__param_dtype="bfloat16")
