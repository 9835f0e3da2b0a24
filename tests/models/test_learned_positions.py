"""Learned positions of a language model: values, state, documents, the length of the table."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax import sharding
from lnssm_jax.generate import SamplingOptions, generate
from lnssm_jax.models import LanguageModel
from tests.mixers.helpers import drawn, split

TOKENS = jax.random.randint(jax.random.key(0), (2, 6), 0, 13)
run = jax.jit(lambda lm, *arguments: lm(*arguments))


@functools.cache
def model() -> LanguageModel:
  sizes = {"vocab_size": 13, "dim": 8, "num_layers": 2, "mixer": "lrn", "learned_positions": 8}
  build = lambda: LanguageModel(**sizes, rngs=nnx.Rngs(0))
  graph, params = split(drawn(build))
  params["positions"] = 3 * jax.random.normal(jax.random.key(1), (8, 8))
  return nnx.merge(graph, params)


def test_positions_are_added_to_the_embedding():
  """A model without them, whose embedding of each token is that of the token at its position."""
  lm = model()
  graph, params = split(jax.eval_shape(lambda: LanguageModel(
    vocab_size=12, dim=8, num_layers=2, mixer="lrn", rngs=nnx.Rngs(0)
  )))  # fmt: skip
  rest = {name: x for name, x in split(lm)[1].items() if name != "positions"}
  sums = lm.embedding[...][TOKENS] + lm.positions[...][:6]
  plain = nnx.merge(graph, {**params, **rest, "embedding": sums.reshape(12, 8)})
  want = run(plain, jnp.arange(12).reshape(2, 6))[0]
  np.testing.assert_allclose(run(lm, TOKENS)[0], want, rtol=1e-5, atol=1e-5)


def test_decoding_and_packed_documents_count_from_their_start():
  lm = model()
  logits, last = run(lm, TOKENS)
  state, steps = lm.init_state(2), []
  for t in range(6):
    step, state = run(lm, TOKENS[:, t : t + 1], state)
    steps.append(step)
  np.testing.assert_allclose(jnp.concatenate(steps, axis=1), logits, rtol=1e-5, atol=1e-5)
  np.testing.assert_array_equal(state.position, last.position)
  np.testing.assert_array_equal(state.position, [[6, 6]])

  ids = jnp.array([[0] * 4 + [1] * 2] * 2)
  packed, state = run(lm, TOKENS, None, ids)
  alone = run(lm, TOKENS[:, 4:])[0]
  np.testing.assert_allclose(packed[:, 4:], alone, rtol=1e-5, atol=1e-5)
  np.testing.assert_array_equal(state.position, [[2, 2]])


def test_generated_text_is_that_of_repeated_calls():
  lm, tokens = model(), [3, 1, 4]
  (got,) = generate(lm, [tokens], SamplingOptions(max_tokens=4, temperature=0, prefill_chunk=2))
  for _ in range(4):
    tokens = [*tokens, int(np.argmax(np.asarray(run(lm, jnp.array([tokens]))[0])[0, -1]))]
  assert list(got)[-4:] == tokens[-4:]
  with pytest.raises(ValueError, match="max_length=8"):
    generate(lm, [tokens], SamplingOptions(max_tokens=4))


def test_document_beyond_the_table_raises_or_is_nan():
  lm, tokens = model(), jnp.zeros((1, 9), int)
  assert lm.max_length == 8
  with pytest.raises(ValueError, match=r"x has 9 tokens after 0 .* max_length=8"):
    lm(tokens)
  logits, _ = run(lm, tokens, None, jnp.zeros((1, 9), int))
  assert np.isfinite(logits[:, :8]).all() and np.isnan(logits[:, 8]).all()
  with pytest.raises(ValueError, match="learned_positions=0 must"):
    sizes = {"vocab_size": 3, "dim": 2, "num_layers": 1, "mixer": "lrn"}
    LanguageModel(**sizes, learned_positions=0, rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match="embed needs `positions`"):
    lm.embed(tokens)


def test_table_is_sharded_and_has_no_weight_decay():
  params = split(model())[1]
  assert sharding.param_specs(params)["positions"] == jax.sharding.PartitionSpec(None, "fsdp")
  assert not sharding.has_weight_decay(params)["positions"]
