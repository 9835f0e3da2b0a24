"""A language model of each mixer: it runs, it decodes, it has gradients, it learns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.generate import generate
from lnssm_jax.mixers import MIXERS
from lnssm_jax.models import CHANNEL_MIXERS, LanguageModel, count_parameters
from tests.mixers.plain_lnssm import relative_error, split
from tests.mixers.tiny import TINY

B, T, VOCAB = 2, 6, 13
# What a model adds to a mixer is the same for all: in every run, one of each kind of state.
IN_EVERY_RUN = ("gsa", "hyena", "lnssm", "longhorn", "mamba2", "rwkv4", "s4d", "softmax_attention")
TOKENS = jax.random.randint(jax.random.key(0), (B, T), 0, VOCAB)


def model(mixer: str, **options) -> LanguageModel:
  sizes = {"vocab_size": VOCAB, "dim": 8, "num_layers": 2, "num_heads": 2} | options
  options = {"mixer_options": TINY[mixer].model_options} | sizes
  return LanguageModel(mixer=mixer, **options, rngs=nnx.Rngs(0))


def disturbed(mixer: str, **options) -> LanguageModel:
  """No parameter at its initial value: mixers that start as zero do something. One program."""
  return jax.jit(lambda: _disturbed(model(mixer, **options)))()


def _disturbed(model):
  graphdef, params = split(model)
  leaves, structure = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  noise = lambda leaf, key: leaf + 0.3 * jax.random.normal(key, leaf.shape, leaf.dtype)
  return nnx.merge(graphdef, jax.tree.unflatten(structure, map(noise, leaves, keys)))


@jax.jit
def apply(model, tokens, state):
  return model(tokens, state)


@pytest.mark.parametrize(
  "mixer",
  [pytest.param(name, marks=[pytest.mark.slow] * (name not in IN_EVERY_RUN)) for name in MIXERS],
)
def test_a_model_decodes_and_learns(mixer):
  lm = disturbed(mixer)
  logits, last = apply(lm, TOKENS, lm.init_state(B))
  assert logits.shape == (B, T, VOCAB)

  state, steps = lm.init_state(B), []
  for t in range(T):
    step, state = apply(lm, TOKENS[:, t : t + 1], state)
    steps.append(step)
  assert relative_error(jnp.concatenate(steps, axis=1), logits) < 1e-5
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
  jax.tree.map(close, state, last)

  loss = lambda lm: -jnp.mean(jax.nn.log_softmax(lm(TOKENS)[0])[..., 0])
  loss_and_gradients = jax.jit(jax.value_and_grad(loss))
  before, gradients = loss_and_gradients(lm)
  for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
    assert np.isfinite(gradient).all(), jax.tree_util.keystr(path)
    constant = "fixed_" in jax.tree_util.keystr(path)  # not learned, but different in each layer
    assert np.any(gradient != 0) != constant, jax.tree_util.keystr(path)

  descend = lambda leaf, gradient: np.asarray(leaf) - 0.05 * np.asarray(gradient)
  for _ in range(5):
    lm = jax.tree.map(descend, lm, gradients)
    after, gradients = loss_and_gradients(lm)
  assert after < before - 0.01


def test_without_a_channel_mixer_a_layer_is_a_norm_and_a_mixer():
  lm = jax.eval_shape(lambda: model("mamba", channel_mixer="none", num_heads=None))
  mixer = jax.eval_shape(
    lambda: MIXERS["mamba"](8, num_layers=2, **TINY["mamba"].options, rngs=nnx.Rngs(0))
  )
  assert count_parameters(lm) == 2 * (count_parameters(mixer) + 16) + 2 * VOCAB * 8 + 32
  assert set(split(lm)[1]["blocks"]) == {"mixer", "mixer_norm"}


def test_a_block_without_a_channel_mixer_adds_the_mixer_only():
  lm = disturbed("mamba", channel_mixer="none", num_layers=1)
  block = jax.tree.map(lambda leaf: leaf[0], lm.blocks)
  x = jax.random.normal(jax.random.key(2), (B, T, 8))
  want = jax.jit(lambda block: x + block.mixer(block.mixer_norm(x))[0])(block)
  np.testing.assert_array_equal(jax.jit(lambda block: block(x)[0])(block), want)


def test_mixers_with_heads_need_their_number():
  assert "none" in CHANNEL_MIXERS
  with pytest.raises(ValueError, match="num_heads=None: mixer 'lnssm' has heads"):
    model("lnssm", num_heads=None)
  with pytest.raises(ValueError, match="dim=8 is not a multiple of num_heads=3"):
    model("lnssm", num_heads=3)
  jax.eval_shape(lambda: model("mamba", num_heads=3))  # has no heads, so any number goes


@pytest.mark.slow
@pytest.mark.parametrize("mixer", list(MIXERS))
def test_prompts_padded_into_one_batch_are_continued_as_if_alone(mixer):
  """Padding is a segment before the prompt; one prompt begins where a chunk does."""
  lm, prompts = disturbed(mixer), [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10], [11]]
  options = {"max_tokens": 5, "temperature": 0, "prefill_chunk": 4}
  batch = generate(lm, prompts, **options)
  for prompt, together in zip(prompts, batch, strict=True):
    (alone,) = generate(lm, [prompt], **options)
    np.testing.assert_array_equal(alone, together)
