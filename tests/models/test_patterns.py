"""Models of several mixers, with other norms, and with a tied embedding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from lnssm_jax import sharding
from lnssm_jax.generate import generate
from lnssm_jax.models import REMAT_POLICIES, LanguageModel
from tests.mixers.plain_lnssm import relative_error, split

SIZES = {"vocab_size": 19, "dim": 8, "num_heads": 2}
PATTERN = ("rg_lru", "rg_lru", "lnssm")
TOKENS = jax.random.randint(jax.random.key(0), (2, 6), 0, 19)


@functools.partial(jax.jit, static_argnames=("num_layers", "unroll", "remat", "channel_mixer"))
def hybrid(num_layers, unroll=1, remat="none", channel_mixer="rwkv4_channel_mix"):
  """No parameter at its initial value."""
  model = LanguageModel(
    **SIZES,
    num_layers=num_layers,
    mixer=PATTERN,
    mixer_options={"lnssm": {"shift": "kvg"}},
    channel_mixer=channel_mixer,
    unroll=unroll,
    remat=remat,
    rngs=nnx.Rngs(0),
  )
  leaves, structure = jax.tree.flatten(model)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  noise = lambda leaf, key: leaf + 0.3 * jax.random.normal(key, leaf.shape, leaf.dtype)
  return jax.tree.unflatten(structure, map(noise, leaves, keys))


apply = jax.jit(lambda model, tokens, state=None, ids=None: model(tokens, state, ids))


@pytest.mark.parametrize("num_layers", [pytest.param(3, marks=pytest.mark.slow), 5])
def test_layers_repeat_the_pattern(num_layers):
  model = hybrid(num_layers)
  x = model.embed(TOKENS)
  for layer in range(num_layers):
    block = jax.tree.map(lambda leaf: leaf[layer // 3], model.blocks[str(layer % 3)])  # noqa: B023
    assert type(block.mixer).__name__ == ("RGLRU", "RGLRU", "LNSSM")[layer % 3]
    x, _ = jax.jit(lambda block, x: block(x))(block, x)
  got, _ = apply(model, TOKENS)
  assert relative_error(got, model.logits(model.norm(x))) < 1e-5


def test_a_pattern_decodes():
  """Five layers: the last pattern is not whole. RWKV's channel mixing has a state of its own."""
  model = hybrid(5)
  whole, last = apply(model, TOKENS, model.init_state(2))
  state, steps = model.init_state(2), []
  for t in range(6):
    logits, state = apply(model, TOKENS[:, t : t + 1], state)
    steps.append(logits)
  assert relative_error(jnp.concatenate(steps, axis=1), whole) < 1e-5
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), state, last)


@pytest.mark.slow
def test_a_pattern_takes_packed_documents_and_generates():
  model = hybrid(5)
  packed, _ = apply(model, TOKENS, None, jnp.asarray([[0, 0, 1, 1, 1, 1]] * 2))
  assert relative_error(packed[:, 2:], apply(model, TOKENS[:, 2:])[0]) < 1e-5
  prompt = [int(token) for token in TOKENS[0]]
  (tokens,) = generate(model, [prompt], max_tokens=3, temperature=0, prefill_chunk=4)
  for n in range(3):
    logits, _ = apply(model, jnp.asarray([prompt + list(map(int, tokens[:n]))]))
    assert tokens[n] == jnp.argmax(logits[0, -1])


@pytest.mark.slow
def test_gradients_do_not_depend_on_the_loop():
  loss = jax.jit(jax.value_and_grad(lambda model: jnp.sin(model(TOKENS)[0]).sum()))
  want = loss(hybrid(5, channel_mixer="gpt2"))
  others = [{"unroll": 5}, *({"remat": name} for name in REMAT_POLICIES if name != "none")]
  for options in others:
    got = loss(hybrid(5, channel_mixer="gpt2", **options))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, jax.tree.leaves(got), jax.tree.leaves(want))


def test_generation_stays_within_the_cache():
  options = {"softmax_attention": {"max_length": 8}}
  pattern = ("lnssm", "softmax_attention")
  model = LanguageModel(
    **SIZES, num_layers=2, mixer=pattern, mixer_options=options, rngs=nnx.Rngs(0)
  )
  assert model.max_length == 8
  assert hybrid(3).max_length is None
  with pytest.raises(ValueError, match=r"max_tokens=5 after a prompt of 5 tokens.*max_length=8"):
    generate(model, [[1], [1, 2, 3, 4, 5]], max_tokens=5)


def test_a_pattern_of_one_is_that_mixer():
  sizes = SIZES | {"num_layers": 2}
  build = lambda mixer: jax.jit(lambda: LanguageModel(**sizes, mixer=mixer, rngs=nnx.Rngs(0)))()
  one, plain = build(("lnssm",)), build("lnssm")
  assert jax.tree.structure(one) == jax.tree.structure(plain)
  jax.tree.map(np.testing.assert_array_equal, one, plain)


def test_a_pattern_has_sharding_rules():
  params = split(jax.eval_shape(lambda: hybrid(5)))[1]
  specs = sharding.param_specs(params)
  assert specs["blocks"]["2"]["mixer"]["q_proj"]["kernel"] == PartitionSpec(None, "fsdp", None)


def test_a_tied_embedding_is_the_head():
  options = {"num_layers": 1, "norm": "rms", "embedding_norm": False, "tie_embeddings": True}
  model = LanguageModel(**SIZES, **options, rngs=nnx.Rngs(0))
  assert set(split(model)[1]) == {"embedding", "blocks", "norm"}
  assert 0.01 < float(jnp.std(model.embedding[...])) < 0.03
  hidden, _ = jax.jit(lambda model: model.hidden(TOKENS))(model)
  want = np.asarray(hidden) @ np.asarray(model.embedding[...]).T
  np.testing.assert_allclose(apply(model, TOKENS)[0], want, rtol=1e-5, atol=1e-5)
  gradient = jax.jit(jax.grad(lambda model: model(TOKENS)[0].sum()))(model)
  assert np.isfinite(gradient.embedding[...]).all() and gradient.embedding[...].any()


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"mixer": ()}, r"mixer=\(\) is a pattern of 0 mixers; num_layers=2 needs one of 1 to 2"),
    ({"mixer": PATTERN}, "a pattern of 3 mixers; num_layers=2"),
    ({"mixer": ("lnssm", "rg_lur")}, "mixer='rg_lur' is unknown; did you mean 'rg_lru'"),
    (
      {"mixer": ("lnssm", "rg_lru"), "mixer_options": {"shift": "kvg"}},
      "mixer_options: mixer='shift' is unknown",
    ),
    ({"norm": "rmsnorm"}, "norm='rmsnorm' is unknown; did you mean 'rms'"),
  ],
)
def test_bad_options_are_named(options, message):
  with pytest.raises(ValueError, match=message):
    LanguageModel(**SIZES, num_layers=2, **options, rngs=nnx.Rngs(0))
