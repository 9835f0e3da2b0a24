"""A language model of each mixer: it runs, decodes as it trains, has gradients, learns.

What a model adds to a mixer is the same for all, so every run has one mixer of each kind of state;
the slow sweep has all of them.
"""

import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.generate import SamplingOptions, generate
from lnssm_jax.mixers import MIXERS
from lnssm_jax.models import CHANNEL_MIXERS, LanguageModel, count_parameters
from tests.mixers.helpers import split, with_normal_noise
from tests.mixers.test_contract import STARTS_AT_ZERO
from tests.mixers.tiny import TINY

B, T, VOCAB = 2, 6, 13
# Several numbers per channel and a convolution, a cache of keys and values with a counter. (A token
# shift and a matrix, those of the LNSSM: test_language_model.py.)
IN_EVERY_RUN = ("mamba", "softmax_attention")
TOKENS = jax.random.randint(jax.random.key(0), (B, T), 0, VOCAB)


def model(mixer: str, **options) -> LanguageModel:
  sizes = {"vocab_size": VOCAB, "dim": 8, "num_layers": 2, "num_heads": 2} | options
  options = {"mixer_options": TINY[mixer].model_options} | sizes
  return LanguageModel(mixer=mixer, **options, rngs=nnx.Rngs(0))


def disturbed(mixer: str, **options) -> LanguageModel:
  """No parameter at its initial value: mixers that start as zero do something. One program."""

  def build():
    graph, params = split(model(mixer, **options))
    return nnx.merge(graph, with_normal_noise(params))

  return jax.jit(build)()


def loss_and_rest(lm, tokens, state):
  logits, state = lm(tokens, state)
  return -jnp.mean(jax.nn.log_softmax(logits)[..., 0]), (logits, state)


@pytest.mark.parametrize(
  "mixer",
  [pytest.param(name, marks=[pytest.mark.slow] * (name not in IN_EVERY_RUN)) for name in MIXERS],
)
def test_model_of_a_mixer_decodes_as_it_trains_and_learns(mixer):
  lm = disturbed(mixer)
  start = lm.init_state(B)
  train = jax.jit(jax.value_and_grad(loss_and_rest, has_aux=True))
  (before, (logits, last)), gradients = train(lm, TOKENS, start)
  assert logits.shape == (B, T, VOCAB)

  decode = jax.jit(lambda lm, tokens, state: lm(tokens, state))
  state, steps = start, []
  for t in range(T):
    step, state = decode(lm, TOKENS[:, t : t + 1], state)
    steps.append(step)
  error = jnp.linalg.norm(jnp.concatenate(steps, axis=1) - logits) / jnp.linalg.norm(logits)
  assert error < 1e-5
  chex.assert_trees_all_close(state, last, rtol=1e-4, atol=1e-4)

  chex.assert_tree_all_finite(gradients)
  for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
    constant = "fixed_" in jax.tree_util.keystr(path)  # not learned, but different in each layer
    assert np.any(gradient != 0) != constant, jax.tree_util.keystr(path)

  descend = lambda leaf, gradient: np.asarray(leaf) - 0.05 * np.asarray(gradient)
  for _ in range(5):
    lm = jax.tree.map(descend, lm, gradients)
    (after, _), gradients = train(lm, TOKENS, start)
  assert after < before - 0.01


@pytest.mark.slow
@pytest.mark.parametrize("mixer", list(MIXERS))
def test_first_block_is_neither_silent_nor_loud(mixer):
  """Its mixer's inputs have size 1 with either initialization of the model; some outputs are 0."""

  def sizes():
    for start in ({}, {"embedding_norm": False}):
      lm = model(mixer, dim=256, num_layers=1, **start)
      block = lm.layer(0)
      x = block.mixer_norm(lm.embed(TOKENS))
      yield [jnp.sqrt(jnp.mean(jnp.square(z))) for z in (x, block.mixer(x)[0])]

  for of_inputs, of_outputs in jax.jit(lambda: list(sizes()))():
    assert of_inputs == pytest.approx(1, abs=0.02)
    assert of_outputs == 0 if mixer in STARTS_AT_ZERO else 2e-4 < of_outputs < 2


def test_model_without_channel_mixer_has_norms_and_mixers_only():
  lm = jax.eval_shape(lambda: model("mamba", channel_mixer="none", num_heads=None))
  mixer = jax.eval_shape(
    lambda: MIXERS["mamba"](8, num_layers=2, **TINY["mamba"].options, rngs=nnx.Rngs(0))
  )
  assert count_parameters(lm) == 2 * (count_parameters(mixer) + 16) + 2 * VOCAB * 8 + 32
  assert set(split(lm)[1]["blocks"]) == {"mixer", "mixer_norm"}


@pytest.mark.slow
def test_block_without_channel_mixer_adds_the_mixer_only():
  lm = disturbed("lrn", channel_mixer="none", num_layers=1)
  block = jax.tree.map(lambda leaf: leaf[0], lm.blocks)
  x = jax.random.normal(jax.random.key(2), (B, T, 8))
  got, want = jax.jit(lambda block: (block(x)[0], x + block.mixer(block.mixer_norm(x))[0]))(block)
  chex.assert_trees_all_equal(got, want)


def test_mixers_with_heads_need_their_number():
  assert "none" in CHANNEL_MIXERS
  with pytest.raises(ValueError, match="num_heads=None: mixer 'lnssm' has heads"):
    model("lnssm", num_heads=None)
  with pytest.raises(ValueError, match="dim=8 is not a multiple of num_heads=3"):
    model("lnssm", num_heads=3)
  jax.eval_shape(lambda: model("mamba", num_heads=3))  # has no heads, so any number is accepted


def test_mixers_declare_what_a_model_sets():
  place = ("num_heads", "layer", "num_layers")
  takes = lambda cls: {name for name in place if name in inspect.signature(cls.__init__).parameters}
  wrong = {name: takes(cls) for name, cls in MIXERS.items() if set(cls.set_by_model) != takes(cls)}
  assert wrong == {}


@pytest.mark.slow
@pytest.mark.parametrize("mixer", list(MIXERS))
def test_prompts_padded_into_one_batch_are_continued_as_if_alone(mixer):
  """Padding is a segment before the prompt; one prompt begins where a chunk does."""
  lm, prompts = disturbed(mixer), [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10], [11]]
  options = SamplingOptions(max_tokens=5, temperature=0, prefill_chunk=4)
  batch = generate(lm, prompts, options)
  for prompt, together in zip(prompts, batch, strict=True):
    (alone,) = generate(lm, [prompt], options)
    chex.assert_trees_all_equal(alone, together)
