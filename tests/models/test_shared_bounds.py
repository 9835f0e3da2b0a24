"""HGRN's table of lower bounds, which the layers of a model share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.generate import SamplingOptions, generate
from lnssm_jax.mixers import HGRN, HGRN2
from lnssm_jax.models import LanguageModel
from tests.mixers.helpers import drawn

TOKENS = jax.random.randint(jax.random.key(0), (2, 7), 0, 20)


def model(mixer, lower_bound, num_layers):
  pattern = (mixer,) if isinstance(mixer, str) else mixer
  options = {name: {"lower_bound": lower_bound} for name in pattern if name != "lrn"}
  sizes = {"vocab_size": 20, "dim": 8, "num_layers": num_layers, "num_heads": 2}
  options = options if len(pattern) > 1 else options[mixer]
  build = lambda: LanguageModel(**sizes, mixer=mixer, mixer_options=options, rngs=nnx.Rngs(0))
  return drawn(build)


@jax.jit
@functools.partial(jax.grad, has_aux=True)
def gradient_and_logits(of_model):
  logits, _ = of_model(TOKENS)
  return jnp.sum(jnp.sin(logits)), logits


def tables(of_model):
  """The parameters `bound` of the stacks, by place."""
  if isinstance(of_model.blocks, nnx.Dict):
    return [of_model.blocks[place].mixer.bound for place in "02"]
  return [of_model.blocks.mixer.bound]


def gammas(table):
  """By the definition, in float64."""
  share = np.exp(np.float64(table))
  share /= share.sum(0)
  return np.stack([share[1 : layer + 1].sum(0) for layer in range(len(table))])


@pytest.mark.slow
@pytest.mark.parametrize(
  ("mixer", "layers", "rows"),
  [
    pytest.param("hgrn2", 3, [[0, 1, 2]], marks=pytest.mark.slow),
    pytest.param("hgrn", 3, [[0, 1, 2]], marks=pytest.mark.slow),
    (("hgrn", "lrn", "hgrn"), 4, [[0, 2], [1]]),  # layers 0 and 3, and 2
  ],
)
def test_a_shared_table_is_as_bounds_of_the_layers(mixer, layers, rows):
  shared, learned = model(mixer, "shared", layers), model(mixer, "learned", layers)
  table = np.random.default_rng(1).normal(size=(3, 8))
  for parameter, own in zip(tables(shared), rows, strict=True):
    parameter[...] = jnp.asarray(table[own], jnp.float32)
  bounds = np.sqrt(-np.log1p(-gammas(table)))
  for parameter, own in zip(tables(learned), rows, strict=True):
    parameter[...] = jnp.asarray(bounds[own], jnp.float32)
  by_shared, by_learned = gradient_and_logits(shared), gradient_and_logits(learned)
  np.testing.assert_allclose(by_shared[1], by_learned[1], rtol=2e-5, atol=2e-6)
  second = shared.layer(3 if isinstance(mixer, tuple) else 1).mixer.bound[...]
  np.testing.assert_allclose(second, gammas(table)[rows[0][1]], rtol=1e-6)

  by_table = jnp.concatenate([x[...] for x in tables(by_shared[0])])
  by_bound = np.concatenate([x[...] for x in tables(by_learned[0])])
  order = np.argsort(np.concatenate(rows))
  by_bound = by_bound[order] * np.where(bounds > 0, 0.5 / np.where(bounds > 0, bounds, 1), 0)
  by_gamma = by_bound / (1 - gammas(table))  # d bound / d gamma = exp(bound^2) / (2 bound)
  with jax.enable_x64():
    back = jax.vjp(HGRN2.tie, jnp.asarray(table))[1](jnp.asarray(by_gamma))[0]
  np.testing.assert_allclose(by_table[order], back, rtol=2e-3, atol=1e-5)


def test_text_is_that_of_the_whole_model():
  of_model = model("hgrn2", "shared", 3)
  tables(of_model)[0][...] = jax.random.normal(jax.random.key(1), (3, 8))
  (text,) = generate(of_model, [[1, 2, 3]], SamplingOptions(max_tokens=3, temperature=0.0))
  logits, _ = jax.jit(lambda of_model, tokens: of_model(tokens))(
    of_model, jnp.asarray([[1, 2, 3, *text[:-1].tolist()]])
  )
  assert logits[0, 2:].argmax(-1).tolist() == text.tolist()


@pytest.mark.parametrize("build", [HGRN, lambda *a, **k: HGRN2(*a, num_heads=2, **k)])
def test_a_layer_by_itself_has_no_table(build):
  mixer = build(8, lower_bound="shared", rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match="lower_bound='shared' is a table of all layers"):
    mixer(jnp.ones((1, 2, 8)))
