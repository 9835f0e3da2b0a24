"""Channel mixers against their formulas in float64 numpy; and under any time mixer."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.models import CHANNEL_MIXERS, LanguageModel
from train import flops
from train.config import Model

NAMES = [name for name, cls in CHANNEL_MIXERS.items() if cls is not None]
silu = lambda x: x / (1 + np.exp(-x))
gelu = lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2
PLAIN = {
  "gpt2": lambda x, p: gelu(x @ p["up"]) @ p["down"],
  "swiglu": lambda x, p: (silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"],
  "geglu": lambda x, p: (gelu(x @ p["gate"]) * (x @ p["up"])) @ p["down"],
}


def kernels(mixer):
  flat = nnx.to_flat_state(nnx.state(mixer, nnx.Param))
  return {path[0]: np.asarray(leaf[...], np.float64) for path, leaf in flat}


@pytest.mark.parametrize("name", NAMES)
def test_the_formula(name):
  mixer = CHANNEL_MIXERS[name](24, rngs=nnx.Rngs(0))
  x = np.random.default_rng(0).normal(size=(2, 5, 24))
  want = PLAIN[name](x, kernels(mixer))
  got = mixer(jnp.asarray(x, jnp.float32))
  assert got.shape == x.shape
  assert np.linalg.norm(got - want) < 1e-6 * np.linalg.norm(want)


@pytest.mark.parametrize(
  ("name", "dim", "hidden"),
  [
    ("gpt2", 512, 2048),
    ("swiglu", 512, 1536),
    ("swiglu", 1024, 2816),
    ("swiglu", 96, 256),
    ("geglu", 512, 1536),
  ],
)
def test_the_hidden_width_and_its_cost(name, dim, hidden):
  mixer = jax.eval_shape(lambda: CHANNEL_MIXERS[name](dim, rngs=nnx.Rngs(0)))
  assert mixer.up.kernel.shape == (dim, hidden)
  assert mixer.down.kernel.shape == (hidden, dim)
  products = 2 if name == "gpt2" else 3
  assert flops.CHANNEL_MIXERS[name](dim) == 2 * products * dim * hidden


@pytest.mark.parametrize(("name", "spread"), [("swiglu", 0.02), ("geglu", 128**-0.5)])
def test_initial_kernels(name, spread):
  mixer = CHANNEL_MIXERS[name](128, rngs=nnx.Rngs(0))
  for kernel in (mixer.gate.kernel, mixer.up.kernel):
    assert abs(float(jnp.std(kernel[...])) / spread - 1) < 0.02


def test_dtypes():
  mixer = CHANNEL_MIXERS["swiglu"](16, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
  assert mixer(jnp.ones((1, 16))).dtype == jnp.bfloat16
  assert mixer.up.kernel[...].dtype == jnp.float32


@pytest.mark.parametrize(("mixer", "name"), [("lnssm", "swiglu"), ("gla", "geglu")])
def test_a_language_model_with_it(mixer, name):
  sizes = {"vocab_size": 31, "dim": 16, "num_layers": 2, "num_heads": 2}
  model = LanguageModel(**sizes, mixer=mixer, channel_mixer=name, rngs=nnx.Rngs(0))
  tokens = jnp.arange(12).reshape(2, 6)
  grads = nnx.grad(lambda model: jnp.square(model(tokens)[0]).mean())(model)
  leaves = jax.tree.leaves(grads)
  assert all(bool(jnp.isfinite(x).all()) for x in leaves)
  assert float(jnp.abs(grads["blocks"]["channel_mixer"]["gate"]["kernel"][...]).max()) > 0


def test_flops_know_every_channel_mixer():
  assert set(flops.CHANNEL_MIXERS) == set(CHANNEL_MIXERS)
  sizes = {"dim": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 16}
  counted = [
    flops.model_flops_per_token(Model(mixer="lnssm", channel_mixer=name, **sizes))
    for name in ("none", "geglu")
  ]
  assert counted[1] - counted[0] == 2 * 18 * 8**2
