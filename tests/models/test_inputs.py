"""A language model inside other models: padded rows, embeddings for tokens, all hidden states."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.models import LanguageModel
from tests.mixers.helpers import relative_error, split

B, T, L = 3, 5, 5
LENGTHS = np.array([5, 2, 0])
TOKENS = jax.random.randint(jax.random.key(0), (B, T), 0, 11)
# A pattern that is not whole, a state in the channel mixer, a counter of positions.
OPTIONS = {"vocab_size": 11, "dim": 8, "num_layers": L, "num_heads": 2}
OPTIONS |= {"mixer": ("lrn", "rg_lru"), "channel_mixer": "rwkv4_channel_mix"}


def build():
  return LanguageModel(**OPTIONS, learned_positions=8, embedding_scale=3.0, rngs=nnx.Rngs(0))


@functools.cache
def model():
  """Every parameter normal; none is computed by the model's own program, which is long."""
  graph, shapes = split(jax.eval_shape(build))
  random = np.random.default_rng(0)
  draw = lambda leaf: jnp.asarray(random.normal(size=leaf.shape), leaf.dtype)
  return nnx.merge(graph, jax.tree.map(draw, shapes))


apply = jax.jit(lambda model, tokens, state=None: model(tokens, state))


@pytest.mark.parametrize(
  "continued",
  [pytest.param(False, id="start"), pytest.param(True, id="state", marks=pytest.mark.slow)],
)
def test_rows_of_a_padded_batch_equal_each_row_alone(continued):
  state = model().init_state(B)
  if continued:
    state = apply(model(), TOKENS[:, :1], state)[1]
  run = jax.jit(lambda model, tokens, state: model(tokens, state, lengths=LENGTHS))
  padding = np.arange(T) >= LENGTHS[:, None]
  tokens = jnp.where(padding, -1, TOKENS)  # no token at all
  logits, last = run(model(), tokens, state if continued else None)
  chex.assert_trees_all_equal_shapes_and_dtypes(last, state)
  for row, length in enumerate(LENGTHS):
    own, want = state, []
    for t in range(length):
      step, own = apply(model(), TOKENS[:, t : t + 1], own)
      want.append(step[row])
    assert not logits[row, length:].any()
    if length:
      assert relative_error(logits[row, :length], jnp.concatenate(want)) < 1e-5
    of_row = lambda tree, row=row: jax.tree.map(lambda leaf: leaf[:, row], tree)
    chex.assert_trees_all_close(of_row(last), of_row(own), rtol=1e-4, atol=1e-4)


def test_embeddings_in_place_of_tokens_are_rows_of_the_table():
  rows = model().embedding[...][TOKENS]
  chex.assert_trees_all_equal(apply(model(), rows), apply(model(), TOKENS))


def test_hidden_states_are_those_around_each_layer():
  states, last = jax.jit(lambda model: model.hidden_states(TOKENS))(model())
  assert states.shape == (L + 1, B, T, 8)
  block = jax.jit(lambda block, x: block(x)[0])
  for number in range(L):
    assert relative_error(states[number + 1], block(model().layer(number), states[number])) < 1e-6
  logits, want = apply(model(), TOKENS)
  assert relative_error(model().logits(model().norm(states[-1])), logits) < 1e-6
  chex.assert_trees_all_close(last, want, rtol=1e-6)


def test_hidden_states_beyond_the_learned_positions_are_nan():
  ids = jnp.zeros((1, 9), int)  # with segments the length is a value
  call = lambda model: model.hidden_states(ids, None, ids)
  states = jax.eval_shape(call, model())[0]
  assert states.shape == (L + 1, 1, 9, 8)
  states, _ = jax.jit(call)(model())
  np.testing.assert_array_equal(np.isnan(states).all(axis=(0, 1, 3)), np.arange(9) == 8)


@pytest.mark.parametrize("token", [-1, 11])
def test_known_ids_outside_the_vocabulary_raise(token):
  for tokens in (TOKENS.at[1, 2].set(token), np.array([[3, token]])):
    with pytest.raises(ValueError, match=rf"tokens has the id {token}, but .* is 0 to 10; was it"):
      model()(tokens)
  assert jax.eval_shape(model(), TOKENS.at[1, 2].set(token))[0].shape == (B, T, 11)  # not known


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (
      lambda m: m(jnp.zeros((2, 3, 7))),
      r"LanguageModel: tokens has shape \(2, 3, 7\), but embeddings .* in place of tokens",
    ),
    (lambda m: m(jnp.zeros((2, 3, 8), int)), "LanguageModel: tokens has dtype int32.*floating"),
    (lambda m: m(TOKENS, lengths=jnp.ones(2, int)), r"LanguageModel: lengths has shape \(2,\)"),
    (lambda m: m(TOKENS[:1], lengths=np.array([6])), "LanguageModel: lengths has the value 6"),
    (
      lambda m: m(TOKENS, lengths=LENGTHS, dropout_key=jax.random.key(0)),
      "LanguageModel: lengths and dropout_key are both given",
    ),
    (
      lambda m: m(jnp.zeros((1, 12), int), lengths=np.array([9])),
      "LanguageModel: x has 9 tokens.*max_length=8",
    ),
  ],
)
def test_bad_inputs_raise_and_are_named(call, message):
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(lambda: call(build()))
