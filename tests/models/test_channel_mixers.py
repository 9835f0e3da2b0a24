"""Channel mixers against their formulas in float64 numpy; and under any time mixer."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import MIXERS
from lnssm_jax.models import CHANNEL_MIXERS, Block, LanguageModel, ModelConfig
from tests.mixers.helpers import drawn
from train.config import Model
from train.step import flops

RWKV = ["rwkv4_channel_mix", "rwkv6_channel_mix", "rwkv7_channel_mix"]
OTHERS = (*RWKV, "none", "moe")  # experts: test_experts.py
NAMES = [name for name in CHANNEL_MIXERS if name not in OTHERS]
silu = lambda x: x / (1 + np.exp(-x))
gelu = lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2
PLAIN = {
  "gpt2": lambda x, p: gelu(x @ p["up"]) @ p["down"],
  "swiglu": lambda x, p: (silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"],
  "geglu": lambda x, p: (gelu(x @ p["gate"]) * (x @ p["up"])) @ p["down"],
  "identity": lambda x, p: x,
}


def kernels(mixer):
  flat = nnx.to_flat_state(nnx.state(mixer, nnx.Param))
  return {path[0]: np.asarray(leaf[...], np.float64) for path, leaf in flat}


@pytest.mark.parametrize("name", NAMES)
def test_channel_mixer_equals_its_formula(name):
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
    ("rwkv4_channel_mix", 512, 2048),
    ("rwkv6_channel_mix", 512, 1792),
    ("rwkv6_channel_mix", 8, 32),
    ("rwkv7_channel_mix", 512, 2048),
  ],
)
def test_hidden_width_by_default_and_its_cost(name, dim, hidden):
  mixer = jax.eval_shape(lambda: CHANNEL_MIXERS[name](dim, rngs=nnx.Rngs(0)))
  assert mixer.up.kernel.shape == (dim, hidden)
  assert mixer.down.kernel.shape == (hidden, dim)
  weights = [mixer.up, mixer.down, *([mixer.gate] if getattr(mixer, "gate", None) else [])]
  products = sum(layer.kernel.size for layer in weights)
  assert flops.kernel_entries(mixer) == products


@pytest.mark.parametrize("name", [n for n in (*NAMES, *RWKV) if n != "identity"])
def test_hidden_width_as_given_is_used(name):
  mixer = jax.eval_shape(lambda: CHANNEL_MIXERS[name](16, hidden=24, rngs=nnx.Rngs(0)))
  assert (mixer.up.kernel.shape, mixer.down.kernel.shape) == ((16, 24), (24, 16))
  with pytest.raises(ValueError, match="hidden=0"):
    CHANNEL_MIXERS[name](16, hidden=0, rngs=nnx.Rngs(0))


def test_channel_hidden_of_a_model_is_passed_on():
  sizes = {"vocab_size": 5, "dim": 16, "num_layers": 2, "num_heads": 2, "channel_hidden": 24}
  make = lambda name: LanguageModel(**sizes, channel_mixer=name, rngs=nnx.Rngs(0))
  model = jax.eval_shape(lambda: make("swiglu"))
  assert model.blocks.channel_mixer.gate.kernel.shape == (2, 16, 24)
  for name in ("none", "identity"):
    with pytest.raises(ValueError, match=rf"channel_hidden=24 .* channel_mixer='{name}' has none"):
      make(name)


def test_block_with_the_identity_adds_the_norm_of_its_stream():
  sizes = {"vocab_size": 3, "dim": 16, "num_heads": 2, "num_layers": 1}
  config = lambda name: ModelConfig(**sizes, channel_mixer=name)
  place = {"mixer": "gla", "mixer_options": {}, "layer": 0}
  make = lambda name: Block(config(name), **place, rngs=nnx.Rngs(0))
  x = jax.random.normal(jax.random.key(0), (2, 5, 16))
  got, h = (jax.jit(make(name))(x)[0] for name in ("identity", "none"))
  h = np.asarray(h, np.float64)
  norm = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-5)
  np.testing.assert_allclose(got, h + norm, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "spread"), [("swiglu", 0.02), ("geglu", 128**-0.5)])
def test_initial_kernels_have_their_spread(name, spread):
  mixer = CHANNEL_MIXERS[name](128, rngs=nnx.Rngs(0))
  for kernel in (mixer.gate.kernel, mixer.up.kernel):
    assert abs(float(jnp.std(kernel[...])) / spread - 1) < 0.02


def test_dtypes_in_bfloat16_are_as_documented():
  mixer = CHANNEL_MIXERS["swiglu"](16, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
  assert mixer(jnp.ones((1, 16))).dtype == jnp.bfloat16
  assert mixer.up.kernel[...].dtype == jnp.float32


@pytest.mark.parametrize("name", RWKV)
def test_rwkv_channel_mix_equals_its_equations_and_carries_its_state(name):
  """Against its equations; and cut, or packed, with the token before as its state."""
  mixer = drawn(lambda: CHANNEL_MIXERS[name](24, rngs=nnx.Rngs(0)))
  call = jax.jit(lambda mixer, x, state=None, ids=None: mixer(x, state, ids))
  x = np.random.default_rng(0).normal(size=(2, 7, 24))
  p = kernels(mixer)
  before = np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], axis=1)
  stream = lambda mu: mu * x + (1 - mu) * before
  hidden = np.maximum(stream(p["mu_k"]) @ p["up"], 0) ** 2
  want = hidden @ p["down"]
  if mixer.has_gate:
    want = want / (1 + np.exp(-stream(p["mu_r"]) @ p["gate"]))
  x = jnp.asarray(x, jnp.float32)
  got, last = call(mixer, x)
  assert np.linalg.norm(got - want) < 1e-6 * np.linalg.norm(want)
  np.testing.assert_array_equal(last, x[:, -1])

  close = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-5)
  first, state = call(mixer, x[:, :3])
  rest, _ = call(mixer, x[:, 3:], state)
  close(jnp.concatenate([first, rest], axis=1), got)
  packed, _ = call(mixer, x, None, jnp.asarray([[0, 0, 0, 1, 1, 1, 1]] * 2))
  close(packed[:, 3:], call(mixer, x[:, 3:], mixer.init_state(2))[0])


def test_mu_of_the_previous_token_is_one_minus_that_of_the_present_one():
  build = lambda mu_of: CHANNEL_MIXERS["rwkv6_channel_mix"](64, mu_of=mu_of, rngs=nnx.Rngs(0))
  present, previous = build("present"), build("previous")
  x = jax.random.normal(jax.random.key(0), (2, 5, 64))
  for mixer in (present, previous):
    mixer.gate.kernel[...], mixer.down.kernel[...] = jnp.eye(64), jnp.ones((224, 64))
  previous.up.kernel[...] = present.up.kernel[...]
  assert not np.allclose(present.mu_k[...], previous.mu_k[...])
  np.testing.assert_allclose(previous(x)[0], present(x)[0], rtol=1e-5, atol=1e-6)
  with pytest.raises(ValueError, match="mu_of='next' is unknown"):
    build("next")


def test_gpt2_mlp_starts_orthogonal():
  """With gain sqrt(out / in) where the output is the wider side: 2 up, 1 down."""
  mixer = CHANNEL_MIXERS["gpt2"](8, rngs=nnx.Rngs(0))
  for kernel, gain in ((mixer.up.kernel, 2.0), (mixer.down.kernel, 1.0)):
    singular = np.linalg.svd(np.asarray(kernel[...]), compute_uv=False)
    np.testing.assert_allclose(singular, gain, rtol=1e-5)


def test_rwkv_channel_mix_starts_as_published():
  mixers = [CHANNEL_MIXERS[n](8, layer=1, num_layers=4, rngs=nnx.Rngs(0)) for n in RWKV]
  i = np.arange(8) / 8
  for mixer, power in zip(mixers, (1, 3, 4), strict=True):
    np.testing.assert_allclose(mixer.mu_k[...], i ** (0.75**power), rtol=1e-6)
    assert not mixer.down.kernel[...].any()
    if mixer.has_gate:
      np.testing.assert_array_equal(mixer.mu_r[...], mixer.mu_k[...])
      assert not mixer.gate.kernel[...].any()
    gram = np.asarray(mixer.up.kernel[...]) @ np.asarray(mixer.up.kernel[...]).T
    np.testing.assert_allclose(gram, 4 * np.eye(8), atol=1e-5)  # 32 hidden channels, gain 2
  with pytest.raises(ValueError, match="layer=4 must be at least 0 and less than num_layers=4"):
    CHANNEL_MIXERS[RWKV[0]](8, layer=4, num_layers=4, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
  ("mixer", "name"),
  [
    ("hgrn", "swiglu"),
    *(
      pytest.param(*names, marks=pytest.mark.slow)
      for names in (("lnssm", "swiglu"), ("gla", "geglu"))
    ),
  ],
)
def test_model_with_a_gated_mlp_has_gradients(mixer, name):
  sizes = {"vocab_size": 31, "dim": 16, "num_layers": 2, "num_heads": 2}
  sizes |= {} if "num_heads" in MIXERS[mixer].set_by_model else {"num_heads": None}
  build = lambda: LanguageModel(**sizes, mixer=mixer, channel_mixer=name, rngs=nnx.Rngs(0))
  tokens = jnp.arange(12).reshape(2, 6)
  grads = jax.jit(lambda: jax.grad(lambda m: jnp.square(m(tokens)[0]).mean())(build()))()
  chex.assert_tree_all_finite(grads)
  assert float(jnp.abs(grads.blocks.channel_mixer.gate.kernel[...]).max()) > 0


def test_flops_include_the_channel_mixer():
  sizes = {"dim": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 16}
  counted = [
    flops.model_flops_per_token(Model(mixer="lnssm", channel_mixer=name, **sizes), 8)
    for name in ("none", "geglu")
  ]
  assert counted[1] - counted[0] == 2 * 18 * 8**2


@pytest.mark.parametrize("name", ["gpt2", "swiglu", "moe"])
def test_channel_mixer_names_a_wrong_input_or_option(name):
  make = lambda **options: CHANNEL_MIXERS[name](6, hidden=4, **options, rngs=nnx.Rngs(0))
  mixer, x = jax.eval_shape(make), jax.ShapeDtypeStruct((2, 3, 6), jnp.float32)
  wrong = [
    ([[1.0] * 6], "x is a list"),
    (jnp.zeros((2, 5)), r"x has shape \(2, 5\); .* 6 channels"),
  ]
  wrong += [(jnp.zeros((2, 6), int), "x has dtype int32"), (jnp.zeros(()), "x has shape")]
  wrong += [(jnp.zeros((0, 6)), "at least one token")] if name == "moe" else []
  for given, message in wrong:
    with pytest.raises(ValueError, match=message):
      mixer(given)
  options = {"gpt2": [{"use_bias": "no"}], "swiglu": [{"gate_scale": np.nan}, {"use_bias": 1}]}
  experts = [{"weight_eps": -1.0}, {"weight_scale": np.nan}, {"normalize_weights": "no"}]
  for option in options.get(name, experts):
    with pytest.raises(ValueError, match=next(iter(option))):
      make(**option)
  for given in (x, jax.ShapeDtypeStruct((6,), jnp.float32)):
    assert jax.eval_shape(lambda mixer, x: mixer(x), mixer, given).shape == given.shape
