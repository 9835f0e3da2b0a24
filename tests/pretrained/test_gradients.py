"""Gradients of recorded models with the loss of training, in float64 and float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.models.settings import graph_of, params_of
from lnssm_jax.pretrained import hugging_face
from tests.pretrained.published import recorded, write

CASES = ("falcon_h1", "falcon_h1_norm", "fla_rwkv7", "granitemoehybrid", "granitemoehybrid_moe")
CASES += (
  "bailing_hybrid",
  "bailing_hybrid_limits",
  "jamba",
  "kimi_linear",
  "lfm2",
  "lfm2_moe",
  "nemotron_h",
  "nemotron_h_biases",
  "nemotron_h_moe_latent",
)
CASES += ("olmo_hybrid", "olmo_hybrid_rope", "zamba2", "zamba2_adapters")
CASES += ("qwen3_5_text", "qwen3_next", "qwen3_next_moe")
STEP = 1e-6


def loss_of(settings):
  """Cross-entropy of the next tokens as a function of parameters; logits in their dtype."""
  graph = graph_of(settings)

  def loss(params, tokens):
    model = nnx.merge(graph, params)
    hidden, _ = model.hidden(tokens[:, :-1])
    log_probs = jax.nn.log_softmax(hidden @ model.head_kernel())
    return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1).mean()

  return loss


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_gradient_of_a_published_model_is_that_of_its_loss_in_float64(case, tmp_path):
  """Along a random direction, by differences of float64 losses; float32 equals all of float64's."""
  tokens = recorded(case).tokens
  with jax.enable_x64(True):
    loaded = hugging_face.load(write(tmp_path / "wide", case))
    params, loss = params_of(loaded.model), loss_of(loaded.settings["model"])
    gradient = jax.jit(jax.grad(loss))(params, tokens)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    draw = lambda key, x: jax.random.normal(key, x.shape, x.dtype)
    along = jax.tree.unflatten(tree, [draw(*pair) for pair in zip(keys, leaves, strict=True)])
    moved = lambda step: jax.tree.map(lambda x, d: x + step * d, params, along)
    value = jax.jit(loss)
    # Of fourth order: tokens whose norms are small bend the loss along 4,000 parameters.
    at = {n: value(moved(n * STEP), tokens) for n in (-2, -1, 1, 2)}
    difference = (8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * STEP)
    products = jax.tree.map(lambda g, d: jnp.sum(g * d), gradient, along)
    assert abs(sum(jax.tree.leaves(products)) / difference - 1) < 1e-6
    want = np.concatenate([np.ravel(x) for x in jax.tree.leaves(gradient)])
  narrow = hugging_face.load(write(tmp_path / "narrow", case, dtype=np.float32))
  found = jax.jit(jax.grad(loss_of(narrow.settings["model"])))(params_of(narrow.model), tokens)
  got = np.concatenate([np.ravel(x) for x in jax.tree.leaves(found)])
  assert np.linalg.norm(got - want) < 1e-4 * np.linalg.norm(want)
