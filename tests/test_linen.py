"""The Linen faces: the same parameters, the same numbers, and lifted by Linen's transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from lnssm_jax import linen
from lnssm_jax.mixers import MIXERS
from lnssm_jax.models import LanguageModel
from tests.mixers.plain_lnssm import split
from tests.mixers.tiny import DIM, TINY, inputs, randomized

B, T = 2, 5
SOME = ("lnssm", "mamba")  # with values in every run; the others there by names and shapes
names = lambda some: [
  pytest.param(name, marks=[] if name in some else pytest.mark.slow) for name in MIXERS
]


@pytest.mark.parametrize("name", list(MIXERS))
def test_parameters_have_the_same_names_and_shapes(name):
  face = linen.MIXERS[name](DIM, **TINY[name].options)
  assert type(face) is getattr(linen, MIXERS[name].__name__)
  variables = jax.eval_shape(face.init, jax.random.key(0), inputs(B, T))
  module = jax.eval_shape(lambda: MIXERS[name](DIM, **TINY[name].options, rngs=nnx.Rngs(0)))
  sizes = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
  assert sizes(variables) == {"params": sizes(split(module)[1])}
  state = lambda module: jax.eval_shape(lambda: module.init_state(B))
  assert state(face) == state(module)


@pytest.mark.parametrize("name", names(SOME))
def test_calls_give_the_same_numbers(name):
  mixer, x = randomized(name), inputs(B, T)
  place = {}
  if "layer" in MIXERS[name].__init__.__annotations__:
    place = {"layer": 1, "num_layers": 3}
  face = linen.MIXERS[name](DIM, **place, **TINY[name].options)
  apply = jax.jit(lambda params, x, state: face.apply({"params": params}, x, state))
  want = jax.jit(lambda mixer, x, state: mixer(x, state))(mixer, x, mixer.init_state(B))
  got = apply(split(mixer)[1], x, face.init_state(B))
  jax.tree.map(np.testing.assert_array_equal, got, want)


class Layers(nn.Module):
  """Three layers of one mixer, each recomputed in the backward pass."""

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
      nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
    )
    return scan(self.mixer, name="layers")(x, None)[0]


@pytest.mark.parametrize("name", names(SOME[:1]))
def test_inside_scan_and_remat(name):
  x, layers = inputs(B, T), Layers(name)
  variables = jax.jit(layers.init)(jax.random.key(0), x)
  stacked = variables["params"]["layers"]["mixer"]
  noise = lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(1), leaf.shape)
  stacked = jax.tree.map(noise, stacked)
  module = MIXERS[name](DIM, **TINY[name].options, rngs=nnx.Rngs(0))
  graph = split(module)[0]

  def plain(stacked):
    y = x
    for n in range(3):
      y = y + nnx.merge(graph, jax.tree.map(lambda leaf: leaf[n], stacked))(y)[0]  # noqa: B023
    return jnp.sin(y).sum()

  scanned = lambda stacked: jnp.sin(
    layers.apply({"params": {"layers": {"mixer": stacked}}}, x)
  ).sum()
  got, want = (jax.jit(jax.value_and_grad(f))(stacked) for f in (scanned, plain))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


def test_a_language_model():
  options = {"vocab_size": 11, "dim": 8, "num_layers": 3, "num_heads": 2, "mixer": ("lnssm", "gla")}
  tokens = jnp.arange(10).reshape(2, 5)
  face = linen.LanguageModel(**options)
  model = jax.jit(lambda: LanguageModel(**options, rngs=nnx.Rngs(0)))()
  params = split(model)[1]
  logits, _ = jax.jit(face.apply)({"params": params}, tokens, face.init_state(2))
  np.testing.assert_array_equal(logits, jax.jit(lambda model: model(tokens)[0])(model))
  started = jax.eval_shape(face.init, jax.random.key(0), tokens)["params"]
  assert jax.tree.map(jnp.shape, started) == jax.tree.map(jnp.shape, params)


def test_what_is_no_face_is_named():
  with pytest.raises(AttributeError, match="has no attribute 'Mamba9'"):
    linen.Mamba9  # noqa: B018
