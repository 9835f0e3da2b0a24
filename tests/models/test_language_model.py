"""The language model: its size, its layers as one scan, its state, its errors."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from lnssm_jax.mixers import LRN
from lnssm_jax.models import GPT2MLP, LanguageModel, SwiGLU, VisionModel, count_parameters
from lnssm_jax.models.block import NORMS
from tests.mixers.helpers import drawn, relative_error, split
from tests.narrow_arithmetic import narrow_arithmetic

SIZES = {"vocab_size": 37, "dim": 8, "num_layers": 3, "num_heads": 2}
VISION = {"image_size": 2, "patch_size": 2, "num_classes": 3, "dim": 8, "num_layers": 1}


@functools.cache
def random_model(**options) -> LanguageModel:
  """A tiny model with no parameter at its initial value."""
  return drawn(lambda: LanguageModel(**SIZES, **options, rngs=nnx.Rngs(0)))


@jax.jit
def apply(model, tokens, state=None, segment_ids=None):
  return model(tokens, state, segment_ids)


def tokens(B, T, *, seed=0):
  return jax.random.randint(jax.random.key(seed), (B, T), 0, SIZES["vocab_size"])


def abstract_model(**options):
  return jax.eval_shape(lambda: LanguageModel(**options, rngs=nnx.Rngs(0)))


PAPER = {"vocab_size": 50_277, "dim": 512, "num_layers": 6, "num_heads": 4}


def test_model_of_the_paper_has_71_963_648_parameters():
  model = abstract_model(**PAPER)
  assert count_parameters(model) == 71_963_648
  assert count_parameters(split(model)[1]) == 71_963_648


def test_layer_without_shift_of_q_has_d_parameters_fewer():
  model = abstract_model(**PAPER, mixer_options={"shift": "kvg"})
  assert count_parameters(model) == 71_963_648 - 6 * 512


def test_model_of_one_layer_has_the_size_of_the_formula():
  D, V = 8, 37
  model = abstract_model(vocab_size=V, dim=D, num_layers=1, num_heads=2)
  assert count_parameters(model) == 2 * V * D + (13 * D**2 + 10 * D) + 4 * D


def initial_parameters(**options):
  return split(jax.jit(lambda: LanguageModel(**SIZES | options, rngs=nnx.Rngs(0)))())[1]


def test_initial_values_are_the_papers():
  D, V = 8, 37
  params = initial_parameters()
  gram = lambda kernel: np.float64(kernel).T @ np.float64(kernel)
  np.testing.assert_allclose(gram(params["embedding"]), V * 1e-8 * np.eye(D), atol=1e-12)
  np.testing.assert_allclose(gram(params["head"]["kernel"].T), V / D / 4 * np.eye(D), atol=1e-5)
  mlp = params["blocks"]["channel_mixer"]
  for layer in range(3):
    np.testing.assert_allclose(gram(mlp["up"]["kernel"][layer].T), 4 * np.eye(D), atol=1e-5)
    np.testing.assert_allclose(gram(mlp["down"]["kernel"][layer]), np.eye(D), atol=1e-5)
  assert not np.allclose(mlp["up"]["kernel"][0], mlp["up"]["kernel"][1])
  w = params["blocks"]["mixer"]["w"]
  np.testing.assert_allclose(w[2, 3], -5 + 8 * (3 / 7) ** 2, rtol=1e-6)  # the last layer: r = 1
  np.testing.assert_allclose(params["blocks"]["mixer"]["mu_q"][1, 1], (1 / 8) ** (2 / 3), rtol=1e-6)


def test_initial_values_with_a_small_vocabulary_are_scaled():
  params = initial_parameters(vocab_size=5)
  gram = lambda kernel: np.float64(kernel) @ np.float64(kernel).T
  np.testing.assert_allclose(gram(params["embedding"]), 8e-8 * np.eye(5), atol=1e-13)
  np.testing.assert_allclose(gram(params["head"]["kernel"].T), 0.25 * np.eye(5), atol=1e-6)


def test_mlp_uses_the_exact_gelu():
  mlp = GPT2MLP(4, rngs=nnx.Rngs(0))
  x = np.linspace(-2, 2, 8).reshape(2, 4)
  up, down = (np.float64(layer.kernel[...]) for layer in (mlp.up, mlp.down))
  assert up.shape == (4, 16)
  hidden = x @ up
  normal_cdf = 0.5 * (1 + np.vectorize(math.erf)(hidden / np.sqrt(2)))
  np.testing.assert_allclose(mlp(jnp.float32(x)), hidden * normal_cdf @ down, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_scan_over_layers_equals_a_loop():
  model, ids = random_model(), tokens(2, 9)
  got, _ = apply(model, ids)

  def norm(x, layer):
    x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)
    return x * layer.scale[...] + layer.bias[...]

  @jax.jit
  def loop(model):
    x = norm(model.embedding[...][ids], model.embedding_norm)
    for number in range(3):
      block = jax.tree.map(lambda leaf, number=number: leaf[number], model.blocks)
      x = x + block.mixer(norm(x, block.mixer_norm))[0]
      x = x + block.channel_mixer(norm(x, block.channel_norm))
    return norm(x, model.norm) @ model.head.kernel[...]

  np.testing.assert_allclose(got, loop(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
  "others",
  [
    [{"remat": "dots", "unroll": 3}],
    pytest.param([{"remat": "full"}, {"remat": "full", "unroll": 3}], marks=pytest.mark.slow),
  ],
  ids=["dots", "full"],
)
def test_loss_and_gradients_with_any_remat_and_unroll_are_equal(others):
  ids, results = tokens(2, 5), []
  params = split(random_model(mixer="lrn"))[1]
  for options in [{}, *others]:
    graphdef = nnx.graphdef(abstract_model(**SIZES, mixer="lrn", **options))

    def loss(params, graphdef=graphdef):
      logits, _ = nnx.merge(graphdef, params)(ids[:, :-1])
      return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

    results.append(jax.jit(jax.value_and_grad(loss))(params))
  for result in results[1:]:
    chex.assert_trees_all_close(result, results[0], rtol=1e-4, atol=1e-6)


def test_dtypes_in_bfloat16_are_as_documented():
  model = abstract_model(**SIZES, dtype=jnp.bfloat16)
  program, (logits, state) = jax.make_jaxpr(apply, return_shape=True)(model, tokens(2, 5))
  # The residual stream and the gate; norms, decays, the GELU and sums are float32.
  assert narrow_arithmetic(program) == {"add", "logistic", "mul"}
  assert jax.eval_shape(lambda m: m.embed(tokens(2, 5)), model).dtype == jnp.bfloat16
  hidden, _ = jax.eval_shape(lambda m: m.hidden(tokens(2, 5)), model)
  assert (logits.dtype, hidden.dtype) == (jnp.float32, jnp.bfloat16)
  assert {leaf.dtype for leaf in jax.tree.leaves((state, model))} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize(
  "options",
  [{}, {"learned_positions": 5}, {"embedding_scale": 2.0}, {"embedding_norm": True}],
  ids=str,
)
def test_residual_stream_has_the_dtype_of_the_model_whatever_its_parameters_have(options):
  ids = tokens(2, 5)
  for dtype, param_dtype in ((jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16)):
    options = {"embedding_norm": False, "mixer": "lrn"} | options
    model = abstract_model(**SIZES, dtype=dtype, param_dtype=param_dtype, **options)
    for given in (ids, jnp.zeros((2, 5, 8), param_dtype)):
      streams, _ = jax.eval_shape(lambda m, given=given: m.hidden_states(given), model)
      assert streams.dtype == dtype


def test_logits_in_bfloat16_are_summed_and_returned_in_float32():
  model = random_model(dtype=jnp.bfloat16)
  hidden = jax.random.normal(jax.random.key(0), (4, SIZES["dim"]), jnp.bfloat16)
  kernel = model.head.kernel[...].astype(jnp.bfloat16)
  want = np.asarray(hidden, np.float64) @ np.asarray(kernel, np.float64)
  np.testing.assert_allclose(model.logits(hidden), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NORMS)
def test_norms_have_an_epsilon_of_1e_5_under_the_root(name):
  x = 1e-3 * np.random.default_rng(0).normal(size=(3, 5))
  norm = NORMS[name](5)
  x = x if name == "rms" else x - x.mean(-1, keepdims=True)
  want = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5)
  np.testing.assert_allclose(norm(jnp.float32(x)), want, rtol=1e-4)


def test_layer_norm_without_bias_subtracts_the_mean_and_has_a_scale_only():
  norm = NORMS["layer_without_bias"](5)
  assert list(nnx.to_pure_dict(nnx.state(norm, nnx.Param))) == ["scale"]
  x = np.random.default_rng(0).normal(size=(3, 5))
  want = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
  np.testing.assert_allclose(norm(jnp.float32(x + 3)), want, rtol=1e-4)


def test_rms_norm_from_zero_is_the_rms_norm_with_one_plus_its_scale():
  x, scale = jax.random.normal(jax.random.key(0), (3, 8)), jnp.linspace(-2.0, 2.0, 8)
  norm, plain = NORMS["rms_from_zero"](8), NORMS["rms"](8)
  np.testing.assert_array_equal(norm.scale[...], jnp.zeros(8))
  np.testing.assert_array_equal(norm(x), plain(x))
  norm.scale[...], plain.scale[...] = scale, 1 + scale
  np.testing.assert_allclose(norm(x), plain(x), rtol=1e-6)
  # In bfloat16, 1 + scale would have 8 bits.
  norm = NORMS["rms_from_zero"](8, param_dtype=jnp.bfloat16)
  norm.scale[...] = jnp.full(8, 2.0**-9, jnp.bfloat16)
  assert norm.scale[...].dtype == jnp.bfloat16
  plain.scale[...] = jnp.full(8, 1 + 2.0**-9)
  np.testing.assert_allclose(norm(x), plain(x), rtol=1e-6)


def test_scales_of_embedding_and_logits_and_their_soft_cap_are_as_documented():
  tokens = jnp.arange(10).reshape(2, 5)
  options = {"mixer": "lrn", "embedding_norm": False}
  plain = random_model(**options)
  other = random_model(**options, embedding_scale=3.0, logit_soft_cap=0.5, logit_scale=0.25)
  np.testing.assert_array_equal(other.head_kernel(), 0.25 * plain.head_kernel())  # that of losses
  np.testing.assert_allclose(other.embed(tokens), 3 * plain.embed(tokens), rtol=1e-6)
  hidden = jax.random.normal(jax.random.key(2), (2, 5, 8))
  want = 0.5 * jnp.tanh(0.25 * plain.logits(hidden) / 0.5)
  np.testing.assert_allclose(other.logits(hidden), want, rtol=1e-5)
  plain.dtype = other.dtype = jnp.bfloat16  # the cap is in float32 whatever the model's dtype
  want = 0.5 * jnp.tanh(0.25 * plain.logits(hidden) / 0.5)
  np.testing.assert_allclose(other.logits(hidden), want, rtol=1e-5)


def test_norm_eps_is_that_of_all_norms_of_the_model():
  model = abstract_model(**SIZES, norm="rms", norm_eps=1e-6)
  norms = (model.embedding_norm, model.blocks.mixer_norm, model.blocks.channel_norm, model.norm)
  assert [norm.eps for norm in norms] == [1e-6] * 4


@pytest.mark.parametrize(
  ("options", "embedding", "head", "down"),
  [
    ({}, 1e-4, 0.5 / math.sqrt(64), None),
    ({"embedding_norm": False}, 0.02, 0.02, 0.02 / math.sqrt(8)),
    ({"tie_embeddings": True}, 0.02, None, 0.02 / math.sqrt(8)),
    ({"initialization": "gpt2"}, 0.02, 0.02, 0.02 / math.sqrt(8)),
  ],
  ids=str,
)
def test_model_starts_as_its_initialization_says(options, embedding, head, down):
  sizes = {"vocab_size": 128, "dim": 64, "num_layers": 4, "num_heads": 2}
  options = {"mixer": "linear_attention", "channel_mixer": "swiglu", "norm": "rms"} | options

  @jax.jit
  def start():
    model = LanguageModel(**sizes, **options, rngs=nnx.Rngs(0))
    rms = lambda x: jnp.sqrt(jnp.mean(jnp.square(x)))
    kernels = model.embedding, None if model.head is None else model.head.kernel
    x = model.embed(jnp.arange(128)[None])
    layer = jax.tree.map(lambda leaf: leaf[0], nnx.state(model.blocks.mixer_norm))
    norm = nnx.merge(nnx.graphdef(model.blocks.mixer_norm), layer)
    sizes_ = [None if k is None else rms(k[...]) for k in kernels]
    return *sizes_, rms(model.blocks.channel_mixer.down.kernel[...]), rms(norm(x))

  *got, of_mixer = start()
  for value, want in zip(got, (embedding, head, down), strict=True):
    assert want is None or value == pytest.approx(want, rel=0.05)
  assert of_mixer == pytest.approx(1, abs=0.02)  # else the first mixer would see next to nothing


@pytest.mark.parametrize(
  ("mixer", "kernel", "size"),
  [
    ("gla", "q_proj", 0.02),
    ("gla", "o_proj", 0.02 / 8**0.5),
    ("mamba", "in_proj", (3 * 64) ** -0.5),
  ],
)
def test_matrices_in_mixers_start_as_the_model_or_as_their_paper(mixer, kernel, size):
  """GLA's models are started as GPT-2; Mamba's matrices have a rule of their own."""
  sizes = {"vocab_size": 8, "dim": 64, "num_layers": 4, "num_heads": 2}

  @jax.jit
  def start():
    options = {"mixer": mixer, "initialization": "gpt2"}
    blocks = LanguageModel(**sizes, **options, rngs=nnx.Rngs(0)).blocks
    kernels = (getattr(blocks.mixer, kernel), blocks.channel_mixer.up)
    return [jnp.sqrt(jnp.mean(jnp.square(layer.kernel[...]))) for layer in kernels]

  assert start() == pytest.approx([size, 0.02], rel=0.05)


def test_tiny_embedding_without_its_norm_raises():
  with pytest.raises(ValueError, match="would start silent"):
    LanguageModel(**SIZES, embedding_norm=False, initialization="lnssm", rngs=nnx.Rngs(0))


def test_logits_in_bfloat16_are_near_float32():
  want, _ = apply(random_model(), tokens(2, 9))
  got, _ = apply(random_model(dtype=jnp.bfloat16), tokens(2, 9))
  assert relative_error(got, want) < 0.02


def test_logits_of_hidden_equal_the_call():
  model = random_model()
  hidden, state = jax.jit(lambda m: m.hidden(tokens(2, 9)))(model)
  logits, want = apply(model, tokens(2, 9))
  np.testing.assert_allclose(hidden @ model.head.kernel[...], logits, rtol=1e-5, atol=1e-5)
  chex.assert_trees_all_close(state, want, rtol=1e-5)


def test_model_split_or_packed_equals_one_call():
  model, ids = random_model(), tokens(2, 18)
  close = functools.partial(chex.assert_trees_all_close, rtol=1e-4, atol=1e-4)
  whole, last = apply(model, ids)
  left, state = apply(model, ids[:, :9])
  chex.assert_trees_all_equal_shapes(state, model.init_state(2))
  right, state = apply(model, ids[:, 9:], state)
  close((jnp.concatenate([left, right], 1), state), (whole, last))

  packed, _ = apply(model, ids, None, jnp.repeat(jnp.array([[0, 1], [5, 2]]), 9, axis=1))
  second, _ = apply(model, ids[:, 9:])
  close((packed[:, :9], packed[:, 9:]), (left, second))


def test_logits_of_a_token_ignore_later_tokens():
  model, ids = random_model(), tokens(2, 18)
  logits, _ = apply(model, ids)
  changed, _ = apply(model, ids.at[:, 10].set((ids[:, 10] + 1) % 37))
  np.testing.assert_array_equal(changed[:, :10], logits[:, :10])
  assert not np.array_equal(changed[:, 10], logits[:, 10])


def test_token_outside_the_vocabulary_gives_nan():
  """A device cannot raise, so the logits of such a row are NaN, not those of some other token."""
  model = random_model()
  for token in (-1, 37):
    logits, _ = apply(model, tokens(2, 9).at[0, 8].set(token))
    assert np.isnan(logits[0, 8]).all()
    assert np.isfinite(logits[1]).all()


def test_parameters_as_dictionaries_round_trip():
  model = random_model()
  graphdef, params = split(model)
  assert type(params) is dict
  assert params["head"]["kernel"].shape == (8, 37)
  want, _ = apply(model, tokens(2, 9))
  np.testing.assert_array_equal(apply(nnx.merge(graphdef, params), tokens(2, 9))[0], want)


@pytest.mark.parametrize(
  "options, message",
  [
    ({"dim": 9}, "dim=9 is not a multiple of num_heads=2"),
    ({"num_layers": 0}, "num_layers=0 must be"),
    ({"vocab_size": 2.5}, "vocab_size=2.5 must be"),
    ({"mixer": "lnsm"}, "mixer='lnsm' is unknown; did you mean 'lnssm'"),
    ({"mixer": "LNSSM"}, "mixer='LNSSM' is unknown; did you mean 'lnssm'"),
    ({"channel_mixer": "gpt"}, "channel_mixer='gpt' is unknown; did you mean 'gpt2'"),
    ({"unroll": 0}, "unroll=0 must be"),
    ({"remat": "dot"}, "remat='dot' is unknown; did you mean 'dots'.*'none', 'full', 'dots'"),
    ({"mixer_options": {"shfit": "kvg"}}, "option='shfit' is unknown; did you mean 'shift'"),
    ({"mixer_options": {"dtype": "x"}}, "option='dtype' is unknown"),
    ({"mixer_options": {"shift": "vkg"}}, "shift='vkg' is unknown; did you mean 'kvg'"),
  ],
)
def test_bad_options_raise_and_are_named(options, message):
  with pytest.raises(ValueError, match=message):
    abstract_model(**SIZES | options)


@pytest.mark.parametrize(
  "build",
  [
    lambda rngs: LanguageModel(**SIZES, rngs=rngs),
    lambda rngs: VisionModel(**VISION, rngs=rngs),
    lambda rngs: GPT2MLP(8, rngs=rngs),
    lambda rngs: SwiGLU(8, rngs=rngs),
  ],
)
def test_rngs_that_are_none_of_flax_raise(build):
  with pytest.raises(ValueError, match=r": rngs=0 must be flax's nnx.Rngs, such as nnx.Rngs\(0\)"):
    build(0)


def test_layer_in_place_of_a_class_raises():
  layer = jax.eval_shape(lambda: LRN(8, rngs=nnx.Rngs(0)))
  with pytest.raises(ValueError, match="mixer is a layer, of LRN, but a model makes its own"):
    abstract_model(**SIZES | {"mixer": layer})


@pytest.mark.parametrize(
  "call, message",
  [
    (lambda m: m(jnp.zeros(4, int)), r"tokens has shape \(4,\)"),
    (lambda m: m(jnp.zeros((2, 3))), "tokens has dtype float32"),
    (lambda m: m(jnp.zeros((2, 0), int)), "at least one token"),
    (
      lambda m: m(tokens(2, 3), m.init_state(1)),
      r"state.mixer.shift has shape \(3, 1, 8\).*\[3, 2, 8\]",
    ),
    (lambda m: m(tokens(2, 3), {"kv": 1}), "state has the structure"),
    (lambda m: m(tokens(2, 3), None, jnp.zeros((2, 4), int)), "segment_ids has shape"),
  ],
)
def test_bad_inputs_raise_and_are_named(call, message):
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(lambda: call(random_model()))
