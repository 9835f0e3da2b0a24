"""Models of several mixers, with other norms, and with a tied embedding."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from lnssm_jax import sharding
from lnssm_jax.generate import SamplingOptions, generate
from lnssm_jax.mixers import LNSSM, LRN
from lnssm_jax.models import REMAT_POLICIES, LanguageModel, layers
from lnssm_jax.models.dropout import ModelDropout
from lnssm_jax.models.settings import complete
from tests.mixers.helpers import drawn, relative_error, split

SIZES = {"vocab_size": 19, "dim": 8, "num_heads": 2}
PATTERN = ("rg_lru", "rg_lru", "lnssm")
TOKENS = jax.random.randint(jax.random.key(0), (2, 6), 0, 19)


@functools.cache
def hybrid(num_layers, unroll=1, remat="none", channel_mixer="rwkv4_channel_mix"):
  options = {"mixer": PATTERN, "mixer_options": {"lnssm": {"shift": "kvg"}}}
  options |= {"unroll": unroll, "remat": remat, "channel_mixer": channel_mixer}
  return drawn(lambda: LanguageModel(**SIZES, num_layers=num_layers, **options, rngs=nnx.Rngs(0)))


apply = jax.jit(lambda model, tokens, state=None, ids=None: model(tokens, state, ids))
run_block = jax.jit(lambda block, x: block(x)[0])
embed = jax.jit(lambda model: model.embed(TOKENS))
read = jax.jit(lambda model, x: model.logits(model.norm(x)))


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [3, 4])
def test_layers_of_a_pattern_repeat_it(num_layers):
  model = hybrid(num_layers)
  x = embed(model)
  for layer in range(num_layers):
    block = model.layer(layer)
    assert type(block.mixer).__name__ == ("RGLRU", "RGLRU", "LNSSM")[layer % 3]
    x = run_block(block, x)
  got, _ = apply(model, TOKENS)
  assert relative_error(got, read(model, x)) < 1e-5


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Recording:
  """Layers of one place of a pattern, whose output is their number and the key of their dropout."""

  number: jax.Array
  mixer = None  # without values for the other layers

  def __call__(self, x, state, segment_ids, dropout):
    return jnp.concatenate([self.number[None], dropout.keys[0]]).reshape(x.shape), state


def test_layers_of_a_pattern_run_in_order_with_keys_of_their_own():
  drops = ModelDropout.of("test", jax.random.key(3), 1, 5, 0.0).layers
  numbers = jnp.arange(5, dtype=jnp.uint32)
  places = [Recording(numbers[::2]), Recording(numbers[1::2])]  # the first has a layer more
  options = {"dropout": drops, "policy": None, "unroll": 1, "with_state": False}
  x = jnp.zeros((1, 1, 3), jnp.uint32)
  streams, _, _ = layers.run(places, x, None, None, with_streams=True, **options)
  want = jnp.concatenate([numbers[:, None], drops.keys[:, 0]], axis=1)
  np.testing.assert_array_equal(streams[1:, 0, 0], want)
  assert [int(layer.number) for layer in layers.apart(places, 5)] == [0, 1, 2, 3, 4]


def test_layers_of_a_pattern_are_built_with_their_numbers_in_the_model():
  """And with keys of their own: layers of equal mixers do not start alike."""
  data = jax.random.key_data
  record = lambda mixer, key, layer: nnx.Dict(number=nnx.Param(layer), key=nnx.Param(data(key)))
  stacks = layers.make_blocks(record, PATTERN, 5, jax.random.key(0))
  found = [stacks[str(place)]["number"][...].tolist() for place in range(3)]
  assert found == [[0, 3], [1, 4], [2]]
  keys = np.concatenate([stacks[str(place)]["key"][...] for place in range(3)])
  assert len(np.unique(keys, axis=0)) == 5


@pytest.mark.slow
def test_pattern_decodes_as_it_reads():
  """Four layers: the last pattern is not whole. RWKV's channel mixing has a state of its own."""
  model = hybrid(4)
  whole, last = apply(model, TOKENS, model.init_state(2))
  state, steps = model.init_state(2), []
  for t in range(6):
    logits, state = apply(model, TOKENS[:, t : t + 1], state)
    steps.append(logits)
  assert relative_error(jnp.concatenate(steps, axis=1), whole) < 1e-5
  chex.assert_trees_all_close(state, last, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_pattern_with_packed_documents_generates():
  model = hybrid(4)
  packed, _ = apply(model, TOKENS, None, jnp.asarray([[0, 0, 1, 1, 1, 1]] * 2))
  assert relative_error(packed[:, 2:], apply(model, TOKENS[:, 2:])[0]) < 1e-5
  prompt = [int(token) for token in TOKENS[0]]
  (tokens,) = generate(
    model, [prompt], SamplingOptions(max_tokens=3, temperature=0, prefill_chunk=4)
  )
  for n in range(3):
    logits, _ = apply(model, jnp.asarray([prompt + list(map(int, tokens[:n]))]))
    assert tokens[n] == jnp.argmax(logits[0, -1])


@pytest.mark.slow
def test_gradients_with_any_remat_and_unroll_are_equal():
  loss = jax.jit(jax.value_and_grad(lambda model: jnp.sin(model(TOKENS)[0]).sum()))
  want = loss(hybrid(4, channel_mixer="gpt2"))
  others = [{"unroll": 4}, *({"remat": name} for name in REMAT_POLICIES if name != "none")]
  for options in others:
    got = loss(hybrid(4, channel_mixer="gpt2", **options))
    got, expected = jax.tree.leaves(got), jax.tree.leaves(want)
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-4)


def test_generation_beyond_the_cache_raises():
  options = {"softmax_attention": {"max_length": 8}}
  pattern = ("lnssm", "softmax_attention")
  build = lambda: LanguageModel(
    **SIZES, num_layers=2, mixer=pattern, mixer_options=options, rngs=nnx.Rngs(0)
  )
  model = jax.eval_shape(build)
  assert model.max_length == 8
  assert hybrid(3).max_length is None
  with pytest.raises(ValueError, match=r"max_tokens=5 after a prompt of 5 tokens.*max_length=8"):
    generate(model, [[1], [1, 2, 3, 4, 5]], SamplingOptions(max_tokens=5))


@pytest.mark.slow
def test_pattern_of_one_equals_that_mixer():
  sizes = SIZES | {"num_layers": 2}
  build = lambda mixer: jax.jit(lambda: LanguageModel(**sizes, mixer=mixer, rngs=nnx.Rngs(0)))()
  one, plain = build(("lrn",)), build("lrn")
  chex.assert_trees_all_equal(one, plain)


class Numbered(LRN):
  """A mixer whose parameters are the number of its layer and a random one."""

  set_by_model = ("layer", "num_layers")

  def __init__(self, dim, *, layer, num_layers, dtype, param_dtype, rngs):
    self.dim = dim
    self.number = nnx.Param(jnp.asarray([layer, num_layers], jnp.float32))
    self.drawn = nnx.Param(jax.random.normal(rngs.params()))


class Other(Numbered):
  """The same as another mixer of a pattern."""


@pytest.mark.slow
def test_layers_of_a_pattern_start_as_the_same_layers_without_one():
  """From the key and the number of their layer, on which decays and token shifts depend."""
  sizes = SIZES | {"num_layers": 5, "channel_mixer": "rwkv4_channel_mix", "norm": "rms"}
  sizes |= {"initialization": "gpt2"}
  build = lambda *mixers: LanguageModel(**sizes, mixer=mixers, rngs=nnx.Rngs(0))
  patterns = [(Numbered,), (Numbered, Other), (Other, Numbered, Other)]
  models = jax.jit(lambda: [build(*pattern) for pattern in patterns])()
  for layer in range(5):
    plain, *others = (split(model.layer(layer))[1] for model in models)
    np.testing.assert_array_equal(plain["mixer"]["number"], [layer, 5])
    mu = (np.arange(8) / 8) ** (1 - layer / 5)
    np.testing.assert_allclose(plain["channel_mixer"]["mu_k"], mu, rtol=1e-5)
    for other in others:
      chex.assert_trees_all_close(other, plain, rtol=1e-4, atol=1e-5)  # of orthogonal matrices
  assert len({float(models[1].layer(layer).mixer.drawn[...]) for layer in range(5)}) == 5


def test_every_place_of_a_pattern_counts():
  """Its dropout is not that of the first, nor its longest sequence."""
  build = lambda *mixers, **options: jax.eval_shape(
    lambda: LanguageModel(
      **SIZES, num_layers=3, mixer=mixers, mixer_options=options, rngs=nnx.Rngs(0)
    )
  )
  lengths = {"softmax_attention": {"max_length": 9}, "cosformer": {"max_length": 7}}
  model = build("softmax_attention", "lrn", "cosformer", **lengths)
  assert (model.max_length, model.has_dropout) == (7, False)
  last = {"attention_dropout": 0.5}
  model = build("softmax_attention", "lrn", "normalized_attention", normalized_attention=last)
  assert model.has_dropout


def test_mixers_of_a_pattern_have_heads_of_their_own():
  options = {"softmax_attention": {"num_heads": 4, "num_kv_heads": 1, "max_length": 8}}
  sizes = SIZES | {"num_layers": 2, "mixer": ("gla", "softmax_attention")}
  build = lambda options: LanguageModel(**sizes, mixer_options=options, rngs=nnx.Rngs(0))
  blocks = jax.eval_shape(lambda: build(options)).blocks
  found = [blocks[place].mixer.num_heads for place in "01"]
  assert found == [2, 4]
  with pytest.raises(ValueError, match="is not a multiple of num_heads=3"):
    build({"softmax_attention": {"num_heads": 3}})
  # Where each has its own, that of the model is no difference.
  own = {"gla": {"num_heads": 2}, "softmax_attention": {"num_heads": 2}}
  settings = sizes | {"num_heads": 2}
  assert complete(settings | {"mixer_options": {}}) == complete(
    settings | {"mixer_options": own, "num_heads": 1}
  )


def test_pattern_has_sharding_rules():
  params = split(hybrid(4))[1]
  specs = sharding.param_specs(params)
  assert specs["blocks"]["2"]["mixer"]["q_proj"]["kernel"] == PartitionSpec(None, "fsdp", None)


class Doubled(LNSSM):
  """A mixer of a user's own: not in `MIXERS`."""

  def _mix(self, x, state, segment_ids):
    y, state = super()._mix(x, state, segment_ids)
    return 2 * y, state


def test_mixer_given_as_a_class_is_used_alone_and_in_patterns():
  build = lambda mixer, **options: jax.eval_shape(
    lambda: LanguageModel(**SIZES, num_layers=2, mixer=mixer, **options, rngs=nnx.Rngs(0))
  )
  alone = build(Doubled, mixer_options={"shift": "kvg"})
  assert type(alone.blocks.mixer) is Doubled
  chex.assert_trees_all_equal(
    split(alone)[1], split(build("lnssm", mixer_options={"shift": "kvg"}))[1]
  )
  pattern = build((Doubled, "gla"), mixer_options={"Doubled": {"shift": "kvg"}})
  assert [type(pattern.blocks[place].mixer).__name__ for place in "01"] == ["Doubled", "GLA"]
  assert "mu_q" not in split(pattern)[1]["blocks"]["0"]["mixer"]


@pytest.mark.slow
def test_tied_embedding_is_the_head():
  options = {"num_layers": 1, "mixer": "lrn", "norm": "rms"}
  options |= {"embedding_norm": False, "tie_embeddings": True}
  model = jax.jit(lambda: LanguageModel(**SIZES, **options, rngs=nnx.Rngs(0)))()
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
      "mixer_options: mixer='shift' is unknown.*of each of its mixers by name",
    ),
    ({"norm": "rmsnorm"}, "norm='rmsnorm' is unknown; did you mean 'rms'"),
    ({"mixer": int}, "mixer=int is not a subclass of lnssm_jax.mixers.Mixer"),
    ({"mixer": Doubled, "mixer_options": {"shfit": 1}}, "'Doubled': option='shfit' is unknown"),
    ({"mixer": Doubled, "num_heads": None}, "num_heads=None: mixer 'Doubled' has heads"),
  ],
)
def test_bad_options_raise_and_are_named(options, message):
  with pytest.raises(ValueError, match=message):
    LanguageModel(**SIZES | {"num_layers": 2} | options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("own", [None, 3, "relu", [1]])
def test_options_of_a_mixer_of_a_pattern_that_are_no_dictionary_raise(own):
  options = {"mixer": ("gla", "lnssm"), "mixer_options": {"gla": own}}
  with pytest.raises(ValueError, match=r"^mixer_options\['gla'\]=.* is no dictionary; give"):
    LanguageModel(**SIZES | {"num_layers": 2} | options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("number", [-1, 4, 1.0, "0"])
def test_layer_that_does_not_exist_raises(number):
  with pytest.raises(ValueError, match=rf"layer={number!r} does not exist; there are 4, from 0 to"):
    hybrid(4).layer(number)
  with pytest.raises(TypeError, match=r"is no list, .*model\.layer\(0\) is the first"):
    hybrid(4).layer(0)[number]
