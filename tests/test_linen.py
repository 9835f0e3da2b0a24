"""The Linen faces: the same parameters, the same numbers, and lifted by Linen's transformations."""

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

from lnssm_jax import generate as generation
from lnssm_jax import linen
from lnssm_jax.generate import SamplingOptions, generate
from lnssm_jax.mixers import MIXERS
from lnssm_jax.models import LanguageModel, VisionModel
from tests.mixers.helpers import drawn, split
from tests.mixers.tiny import DIM, TINY, inputs, randomized

B, T = 2, 5
# The faces are made by one function, so every run has one mixer of each kind of state, and of each
# kind of constructor; the slow sweep has all of them. Their fields are in `linen.pyi`, which
# `tests/test_typing.py` compares.
SHAPES = ("hyena", "lnssm", "mamba", "s4d", "softmax_attention")
VALUES = ("lnssm", "mamba")
names = lambda some: [
  pytest.param(name, marks=[] if name in some else pytest.mark.slow) for name in MIXERS
]


@pytest.mark.parametrize("name", names(SHAPES))
def test_face_has_the_parameters_and_state_of_its_mixer(name):
  face = linen.MIXERS[name](DIM, **TINY[name].options)
  assert type(face) is getattr(linen, MIXERS[name].__name__)
  variables = jax.eval_shape(face.init, jax.random.key(0), inputs(B, T))
  module = jax.eval_shape(lambda: MIXERS[name](DIM, **TINY[name].options, rngs=nnx.Rngs(0)))
  sizes = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
  assert sizes(variables) == {"params": sizes(split(module)[1])}
  state = lambda module: jax.eval_shape(lambda: module.init_state(B))
  assert state(face) == state(module)


@pytest.mark.parametrize("name", names(VALUES))
def test_call_of_a_face_equals_its_mixer(name):
  mixer, x = randomized(name), inputs(B, T)
  place = {"layer": 1, "num_layers": 3} if "layer" in MIXERS[name].set_by_model else {}
  face = linen.MIXERS[name](DIM, **place, **TINY[name].options)
  apply = jax.jit(lambda params, x, state: face.apply({"params": params}, x, state))
  want = jax.jit(lambda mixer, x, state: mixer(x, state))(mixer, x, mixer.init_state(B))
  got = apply(split(mixer)[1], x, face.init_state(B))
  chex.assert_trees_all_equal(got, want)


class Layers(nn.Module):
  """Two layers of one mixer, each recomputed in the backward pass."""

  mixer: str

  @nn.compact
  def __call__(self, x):
    class Layer(nn.Module):
      mixer: str

      @nn.compact
      def __call__(self, x, _):
        face = linen.MIXERS[self.mixer](DIM, **TINY[self.mixer].options, name="mixer")
        return x + face(x)[0], None

    scan = nn.scan(
      nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
    )
    return scan(self.mixer, name="layers")(x, None)[0]


@pytest.mark.parametrize("name", names(("hgrn",)))
def test_face_inside_scan_and_remat_equals_its_mixer(name):
  x, layers = inputs(B, T), Layers(name)
  variables = jax.jit(layers.init)(jax.random.key(0), x)
  stacked = variables["params"]["layers"]["mixer"]
  noise = lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(1), leaf.shape)
  stacked = jax.tree.map(noise, stacked)
  module = MIXERS[name](DIM, **TINY[name].options, rngs=nnx.Rngs(0))
  graph = split(module)[0]

  def plain(stacked):
    y = x
    for n in range(2):
      y = y + nnx.merge(graph, jax.tree.map(lambda leaf: leaf[n], stacked))(y)[0]  # noqa: B023
    return jnp.sin(y).sum()

  scanned = lambda stacked: jnp.sin(
    layers.apply({"params": {"layers": {"mixer": stacked}}}, x)
  ).sum()
  got, want = (jax.jit(jax.value_and_grad(f))(stacked) for f in (scanned, plain))
  chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_face_of_a_language_model_equals_it():
  options = {"vocab_size": 11, "dim": 8, "num_layers": 2, "num_heads": 2, "mixer": ("lrn", "mamba")}
  tokens = jnp.arange(10).reshape(2, 5)
  face = linen.LanguageModel(**options)
  model = drawn(lambda: LanguageModel(**options, rngs=nnx.Rngs(0)))
  params = split(model)[1]
  logits, _ = jax.jit(face.apply)({"params": params}, tokens, face.init_state(2))
  chex.assert_trees_all_equal(logits, jax.jit(lambda model: model(tokens)[0])(model))
  started = jax.eval_shape(face.init, jax.random.key(0), tokens)["params"]
  chex.assert_trees_all_equal_shapes(started, params)


@pytest.mark.slow
def test_face_of_a_vision_model_equals_it():
  options = {"image_size": 4, "patch_size": 2, "num_classes": 3, "channels": 1}
  options |= {"dim": 8, "num_layers": 1, "mixer_options": {"state_dim": 3}}
  images, face = jnp.ones((2, 4, 4, 1)), linen.VisionModel(**options)
  model = drawn(lambda: VisionModel(**options, rngs=nnx.Rngs(0)))
  variables = {"params": split(model)[1]}
  run = jax.jit(lambda model, variables: (model(images), face.apply(variables, images)))
  chex.assert_trees_all_equal(*run(model, variables))
  started = jax.eval_shape(face.init, jax.random.key(0), images)
  chex.assert_trees_all_equal_shapes(started, variables)


def test_unknown_face_raises():
  with pytest.raises(AttributeError, match="has no attribute 'Mamba9'"):
    linen.Mamba9  # noqa: B018


LM = {"vocab_size": 11, "dim": 8, "num_layers": 2, "num_heads": 2, "mixer": "lrn"}


class Encoder(nn.Module):
  """The hidden states of a language model, in a Linen model."""

  @nn.compact
  def __call__(self, tokens):
    return linen.LanguageModel(**LM, name="lm").module().hidden_states(tokens)[0]


@pytest.mark.slow
def test_module_of_a_face_inside_a_model_has_its_other_methods():
  tokens = jnp.arange(10).reshape(2, 5)
  variables = jax.jit(Encoder().init)(jax.random.key(0), tokens)
  run = jax.jit(lambda variables: Encoder().apply(variables, tokens))
  model = linen.LanguageModel(**LM).bind({"params": variables["params"]["lm"]}).module()
  want = jax.jit(lambda model: model.hidden_states(tokens)[0])(model)
  chex.assert_trees_all_equal(run(variables), want)


@pytest.mark.slow
def test_bound_face_generates_as_its_model_in_one_program():
  face = linen.LanguageModel(**LM)
  variables = jax.jit(face.init)(jax.random.key(0), jnp.zeros((1, 1), int))
  bound, options = face.bind(variables), SamplingOptions(max_tokens=4)
  got = generate(bound, [[1, 2, 3], [4]], options)
  programs = generation.decode._cache_size()
  chex.assert_trees_all_equal(got, generate(bound.module(), [[1, 2, 3], [4]], options))
  assert generation.decode._cache_size() == programs


def test_face_without_parameters_raises_naming_bind():
  face = linen.LanguageModel(**LM)
  for call in (face.module, lambda: generate(face, [[1]], SamplingOptions(max_tokens=1))):
    with pytest.raises(ValueError, match=r"linen\.LanguageModel: .* no parameters.*face\.bind"):
      call()


def test_face_takes_lengths_and_embeddings():
  face, x = linen.LanguageModel(**LM), jnp.ones((2, 5, 8))
  variables = jax.eval_shape(face.init, jax.random.key(0), x)
  run = lambda variables: face.apply(variables, x, lengths=jnp.array([5, 2]))
  logits, state = jax.eval_shape(run, variables)
  assert logits.shape == (2, 5, 11)
  chex.assert_trees_all_equal_shapes(state, face.init_state(2))
