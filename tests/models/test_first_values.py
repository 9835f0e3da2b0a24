"""RWKV-7 in a model: later layers mix their values with those of the first one."""

import jax
import numpy as np
from flax import nnx

from lnssm_jax import generate
from lnssm_jax.models import LanguageModel, layers
from tests.mixers.helpers import float64_params, relative_error
from tests.mixers.references import rwkv as reference
from tests.mixers.tiny import with_noise

LAYERS, HEADS = 2, {"num_heads": 2}


def expected(model, tokens):
  """Logits of one text in float64, by the reference of the mixer; without channel mixers."""
  params = float64_params(model)
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


def test_later_layers_mix_their_values_with_the_first_layers():
  """Of a text, of packed ones, and of tokens one by one."""
  sizes = {"vocab_size": 11, "dim": 8, "num_layers": LAYERS, "channel_mixer": "none"}
  sizes |= {"mixer": "rwkv7", "norm": "rms", "embedding_norm": False, "tie_embeddings": True}
  graph, params = nnx.split(LanguageModel(**sizes, **HEADS, rngs=nnx.Rngs(0)))
  model = nnx.merge(graph, with_noise(params))
  tokens = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])
  want = np.concatenate([expected(model, tokens[0, :5]), expected(model, tokens[0, 5:])])
  packed = jax.jit(lambda model: model(tokens, segment_ids=np.array([[0] * 5 + [1] * 3]))[0])(model)
  assert relative_error(packed[0], want) < 3e-6

  @jax.jit
  def read(model):
    """The logits of the last token, read alone after the others."""
    blocks = layers.apart(layers.tied(model.blocks), LAYERS)
    states = layers.apart(model(tokens[:, :4])[1], LAYERS)
    return generate._read_one(model, blocks, (states, None), tokens[:, 4])[1]

  assert relative_error(read(model)[0], want[4]) < 3e-6
