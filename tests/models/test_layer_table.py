"""The layers of a model as a table: several mixers or none, a channel mixer or none, norms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.models import BackboneConfig, Block, LanguageModel, ModelConfig
from lnssm_jax.models.block import make_mixer
from lnssm_jax.models.experts import product_of
from lnssm_jax.models.options import limits_of_layers
from lnssm_jax.models.settings import complete
from lnssm_jax.models.shared import numbers_of_blocks

SIZES = {"dim": 8, "num_heads": 2, "num_layers": 2, "vocab_size": 5, "mixer": "lrn"}
BOTH = {"lrn": {}, "softmax_attention": {"num_kv_heads": 1, "max_length": 16}}


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"mixer": "none", "channel_mixer": "none"}, "neither a mixer nor a channel mixer"),
    ({"norm_place": "behind"}, r"norm_place.*'behind'.*before"),
    ({"norm_place": ("before", "after")}, r"norm_place=.* has 2 layers and mixer='lrn' has 1"),
    (
      {"mixer": ("lrn", "lrn"), "channel_mixer": ("gpt2", "swiglu")}
      | {"channel_mixer_options": {"activation": "silu"}},
      r"channel_mixer_options: channel mixer.*'activation'.*'gpt2', 'swiglu'",
    ),
    (
      {"mixer": ("lrn", "lrn"), "channel_mixer": ("moe", "swiglu")}
      | {"channel_mixer_options": {"moe": {"num_expert": 3}}},
      r"channel_mixer_options of 'moe': option.*'num_expert'",
    ),
    ({"mixer": "parallel"}, "must have the options of two or more mixers by name"),
    (
      {"mixer": "parallel", "mixer_options": {"mixers": BOTH, "input_scales": {"gla": 1.0}}},
      r"input_scales.*'gla'",
    ),
    (
      {"mixer": "parallel", "mixer_options": {"mixers": BOTH | {"lrn": {"widht": 3}}}},
      r"mixer_options of 'lrn'.*'widht'",
    ),
    ({"channel_mixer": "swiglu", "channel_mixer_options": {"limit": "4"}}, "limit='4' is of type"),
    ({"mixer": "after_shared"}, "must have the options of one mixer by name"),
    (
      {"mixer": "after_shared", "mixer_options": {"mixers": {"lrn": {}}, "block": 1}},
      "option='block' is unknown",
    ),
  ],
)
def test_layer_table_with_a_wrong_column_raises(settings, message):
  with pytest.raises(ValueError, match=message):
    ModelConfig(**SIZES | settings)


def test_parallel_mixers_are_the_sum_of_each_alone_also_in_documents_and_step_by_step():
  """With their scales, whether the sequence is one call or two."""
  place = {"num_heads": 2, "layer": 0, "num_layers": 1, "rngs": nnx.Rngs(0)}
  dtypes = {"dtype": jnp.float32, "param_dtype": jnp.float32}
  scales = {"input_scales": {"lrn": 0.5}, "output_scales": {"softmax_attention": 3.0}}
  mixer = make_mixer("parallel", 8, mixers=BOTH, **scales, **place, **dtypes)
  x = jax.random.normal(jax.random.key(0), (2, 6, 8))
  ids = jnp.array([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 2]])

  def both(mixer, x, ids):
    lrn, attention = (mixer.parts[name].mixer for name in BOTH)
    y, state = mixer(x[:, :4], None, ids[:, :4])
    rest, _ = mixer(x[:, 4:], state, ids[:, 4:])
    want = lrn(0.5 * x, None, ids)[0] + 3 * attention(x, None, ids)[0]
    return jnp.concatenate([y, rest], axis=1), want

  got, want = jax.jit(both)(mixer, x, ids)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
  assert mixer.max_length == 16


SHARING = {"mixers": {"lrn": {}}, "num_blocks": 2, "hidden": 6, "rank": 2, "attention_rank": 3}


def test_blocks_are_shared_in_turn_and_a_pattern_that_would_mix_them_raises():
  pattern = ("lrn", "after_shared", "after_shared", "lrn", "after_shared")
  assert numbers_of_blocks(pattern, 5, 2) == [0, 0, 1, 0, 0]
  assert numbers_of_blocks(pattern[:3], 8, 2) == [0, 0, 1]
  with pytest.raises(ValueError, match=r"num_blocks=2 .* has 1 layers .* Give it 2 times in a row"):
    numbers_of_blocks(pattern[:2], 5, 2)
  with pytest.raises(ValueError, match="is for a LanguageModel only"):
    BackboneConfig(dim=8, num_layers=2, num_heads=2, mixer="after_shared", mixer_options=SHARING)
  new = lambda: LanguageModel(
    **SIZES | {"mixer": "after_shared", "mixer_options": SHARING | {"num_blocks": 1}},
    rngs=nnx.Rngs(0),
  )
  model = jax.eval_shape(new)
  assert list(model.shared) == ["0"] and model.max_length == 2048
  with pytest.raises(ValueError, match="the layer is called without its model"):
    jax.eval_shape(lambda model, x: model.layer(0)(x), model, jnp.zeros((1, 2, 8)))


@pytest.mark.slow
def test_layers_after_shared_blocks_read_them_in_turn_with_the_embedding_and_own_corrections():
  """By the formula with W + V U in full, whether the sequence is one call or two, in documents."""
  settings = {"mixer": ("after_shared",) * 2, "mixer_options": {"after_shared": SHARING}}
  settings |= {"channel_mixer": "none", "embedding_norm": False, "norm": "rms"}
  model = LanguageModel(**SIZES | settings, rngs=nnx.Rngs(0))
  graph, params = nnx.split(model, nnx.Param)
  leaves, tree = jax.tree.flatten(params)
  draws = np.random.default_rng(0).normal(size=(len(leaves), 200))
  leaves = [
    0.5 * np.float32(np.resize(d, x.shape)) + 0.1 for d, x in zip(draws, leaves, strict=True)
  ]
  model = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
  tokens = jnp.array([[0, 1, 2, 3, 4, 1], [3, 3, 2, 0, 1, 4]])
  ids = jnp.array([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 2]])

  def both(model, tokens, ids):
    _, state = model.hidden(tokens[:, :4], None, ids[:, :4])
    last, _ = model.hidden(tokens[:, 4:], state, ids[:, 4:])
    x = embedding = model.embed(tokens)
    for number in range(2):
      mixer, block = model.layer(number).mixer, model.shared[str(number)]
      kernel = lambda name, mixer=mixer: getattr(mixer, name).kernel[...]
      attention = jax.tree.map(lambda leaf: leaf, block.mixer)
      for part in "qkv":
        correction = kernel(f"{part}_down_proj") @ kernel(f"{part}_up_proj")
        getattr(attention, f"{part}_proj").kernel[...] += correction
      z = block.mixer_norm(jnp.concatenate([x, embedding], axis=-1))
      n = block.channel_norm(attention(z, None, ids)[0])
      of = lambda name, block=block, kernel=kernel, n=n: (
        n
        @ (
          getattr(block.channel_mixer, name).kernel[...]
          + kernel("mlp_down_proj") @ kernel(f"{name}_up_proj")
        )
      )
      hidden = jax.nn.gelu(of("gate"), approximate=False) * of("up")
      f = hidden @ block.channel_mixer.down.kernel[...]
      x += mixer.mixer(mixer.norm(x + f @ kernel("shared_proj")), None, ids)[0]
    return last, model.norm(x)[:, 4:]

  got, want = jax.jit(both)(model, tokens, ids)
  np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_norm_after_a_branch_and_layers_of_one_branch_follow_their_formulas():
  config = ModelConfig(**SIZES, norm="rms")
  new = lambda **options: Block(
    config, mixer_options={}, layer=0, rngs=nnx.Rngs(0), **({"mixer": "lrn"} | options)
  )
  after, alone = new(norm_place="after"), new(mixer="none")
  scale = jnp.arange(1.0, 9.0)
  for norm in (after.mixer_norm, after.channel_norm, alone.channel_norm):
    norm.scale[...] = scale
  x = jax.random.normal(jax.random.key(0), (1, 3, 8))

  def blocks(after, alone, x):
    h = x + after.mixer_norm(after.mixer(x)[0])
    want = h + after.channel_norm(after.channel_mixer(h))
    mlp = x + alone.channel_mixer(alone.channel_norm(x))
    return (after(x)[0], alone(x)[0]), (want, mlp)

  for got, want in zip(*jax.jit(blocks)(after, alone, x), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
  assert alone.mixer is None and alone.mixer_norm is None and alone.init_state(1).mixer is None


def test_activations_are_bounded_before_their_product_by_the_limit_of_their_layer():
  """Of the gate from above, after the activation; of the other factor both ways."""
  gate, up = (np.float32(np.linspace(*ends, 7)) for ends in ((-3, 3), (4, -5)))
  silu = gate / (1 + np.exp(-gate))
  want = np.minimum(silu, 1.5) * np.clip(up, -1.5, 1.5)
  np.testing.assert_allclose(product_of(jax.nn.silu, gate, up, 1.5), want, rtol=1e-6)
  np.testing.assert_allclose(product_of(jax.nn.silu, gate, up, None), silu * up, rtol=1e-6)
  limits = {"limit": [0, 4, 4], "shared_limit": [0, 5.0, 7]}
  assert limits_of_layers(limits, [1], 3) == {"limit": 4, "shared_limit": 5.0}
  assert limits_of_layers({"limit": 2.0}, [0, 1], 3) == {"limit": 2.0}
  assert limits_of_layers(limits, [0], 3) == {"limit": None, "shared_limit": None}
  with pytest.raises(ValueError, match=r"shared_limit=.* have 5.0 and 7; give a longer pattern"):
    limits_of_layers(limits, [1, 2], 3)
  with pytest.raises(ValueError, match=r"limit=.* has 3 numbers, but num_layers=2"):
    limits_of_layers(limits, [0], 2)
  settings = {"mixer": ("lrn", "lrn"), "channel_mixer": "moe", "channel_hidden": 4}
  options = {"limit": [0, 4], "shared_hidden": 3, "shared_limit": [5.0, 0]}
  new = lambda **more: LanguageModel(
    **SIZES | settings, channel_mixer_options=options | more, rngs=nnx.Rngs(0)
  )
  blocks = jax.eval_shape(new).blocks
  found = [(blocks[x].channel_mixer.limit, blocks[x].channel_mixer.shared.limit) for x in "01"]
  assert found == [(None, 5.0), (4, None)]
  with pytest.raises(ValueError, match=r"limit=None and shared_limit=5\.0 are of gated experts"):
    jax.eval_shape(lambda: new(gated=False))


def test_channel_mixers_of_two_kinds_have_options_of_their_own():
  """A width of all is that of those that have none of their own; defaults are written out."""
  settings = {"mixer": ("lrn", "lrn"), "channel_mixer": ("swiglu", "moe"), "channel_hidden": 6}
  settings |= {"channel_mixer_options": {"moe": {"hidden": 5, "num_experts": 3}}}
  model = jax.eval_shape(lambda: LanguageModel(**SIZES | settings, rngs=nnx.Rngs(0)))
  dense, experts = (model.blocks[place].channel_mixer for place in "01")
  assert dense.up.kernel.shape == (1, 8, 6)
  assert experts.experts.up.kernel.shape == (1, 3, 8, 5)
  options = complete(SIZES | settings)["channel_mixer_options"]
  assert options["swiglu"]["hidden"] == 6 and options["swiglu"]["activation"] == "silu"
  assert options["moe"]["hidden"] == 5 and options["moe"]["experts_per_token"] == 2


def test_layers_without_a_mixer_are_no_recurrence_to_analyze():
  from lnssm_jax import analysis

  pattern = {"mixer": ("lrn", "none"), "channel_mixer": ("none", "gpt2")}
  model = jax.eval_shape(lambda: LanguageModel(**SIZES | pattern, rngs=nnx.Rngs(0)))
  with pytest.raises(ValueError, match="layers without a mixer, mixer='none'"):
    analysis.half_lives(model)
