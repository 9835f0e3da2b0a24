"""RWKV-7 in a model: later layers mix their values with those of the first one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lnssm_jax import generate
from lnssm_jax.mixers import RWKV7
from lnssm_jax.models import LanguageModel, layers
from tests.mixers.helpers import drawn, float64_params, relative_error
from tests.mixers.references import rwkv as reference

LAYERS, HEADS = 2, {"num_heads": 2}


def expected(params, tokens):
  """Logits of one text in float64, by the reference of the mixer; without channel mixers."""
  x, first = params["embedding"][tokens], None
  for layer in range(LAYERS):
    own = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["blocks"])
    normed = rms_norm(x, own["mixer_norm"]["scale"])
    if first is None:
      before = np.concatenate([np.zeros((1, x.shape[1])), normed[:-1]])
      stream = normed + (before - normed) * own["mixer"]["mu_v"]
      first = stream @ own["mixer"]["v_proj"]["kernel"]
    x = x + reference.rwkv7(own["mixer"], normed, **HEADS, first_values=first)
  return rms_norm(x, params["norm"]["scale"]) @ params["embedding"].T


def rms_norm(x, scale):
  return scale * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5)


@functools.cache
def tiny():
  """A model with noise in all parameters."""
  sizes = {"vocab_size": 11, "dim": 8, "num_layers": LAYERS, "channel_mixer": "none"}
  sizes |= {"mixer": "rwkv7", "norm": "rms", "embedding_norm": False, "tie_embeddings": True}
  return drawn(lambda: LanguageModel(**sizes, **HEADS, rngs=nnx.Rngs(0)))


TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])


def test_later_layers_mix_their_values_with_the_first_layers():
  """Of a text, of packed ones, and of tokens one by one."""
  model, tokens, params = tiny(), TOKENS, float64_params(tiny())
  want = np.concatenate([expected(params, tokens[0, :5]), expected(params, tokens[0, 5:])])
  packed = jax.jit(lambda model: model(tokens, segment_ids=np.array([[0] * 5 + [1] * 3]))[0])(model)
  assert relative_error(packed[0], want) < 3e-6

  @jax.jit
  def read(model):
    """The logits of the last token, read alone after the others."""
    blocks = layers.apart(layers.tied(model.blocks), LAYERS)
    states = layers.apart(model(tokens[:, :4])[1], LAYERS)
    return generate._read_one(model, blocks, (states, None), tokens[:, 4])[1]

  assert relative_error(read(model)[0], want[4]) < 3e-6


def test_gradients_of_all_parameters_equal_those_of_the_reference():
  """Along a random direction of each, by differences in float64."""
  random = np.random.default_rng(1)
  weights = random.normal(size=(8, 11))
  graph, params = nnx.split(tiny())
  loss = lambda params: jnp.sum(nnx.merge(graph, params)(TOKENS)[0][0] * weights)
  got = float64_params(nnx.merge(graph, jax.jit(jax.grad(loss))(params)))
  leaves, tree = jax.tree.flatten(float64_params(tiny()))
  step = 1e-5
  for number, gradient in enumerate(jax.tree.leaves(got)):
    direction = random.normal(size=gradient.shape)

    def at(size, number=number, direction=direction):
      moved = [x + size * direction if n == number else x for n, x in enumerate(leaves)]
      return np.sum(weights * expected(tree.unflatten(moved), TOKENS[0]))

    want = (at(step) - at(-step)) / (2 * step)
    size = np.linalg.norm(gradient) * np.linalg.norm(direction)
    assert abs(np.vdot(gradient, direction) - want) <= 3e-6 * size + 1e-9, number


def test_widths_and_initial_values_are_those_of_the_published_code():
  """Of the low-rank matrices, by fla's rule: 2.5, 2.5, 1.7 and 5 sqrt(D) to a multiple of 32."""
  of = {"num_heads": 32, "layer": 1, "num_layers": 24}
  wide = nnx.eval_shape(lambda: RWKV7(2048, **of, rngs=nnx.Rngs(0)))
  downs = (wide.decay_down_proj, wide.rate_down_proj, wide.value_down_proj, wide.gate_down_proj)
  assert [down.kernel.get_raw_value().shape[1] for down in downs] == [128, 128, 64, 224]
  small = RWKV7(8, num_heads=2, layer=1, num_layers=2, rngs=nnx.Rngs(0))
  want = 0.73 - 0.4 * (np.arange(8) / 7 - 0.5)
  np.testing.assert_allclose(small.value_up_proj.bias[...], want, rtol=1e-6)
