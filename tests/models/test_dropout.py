"""Dropout of models: where it acts, that nothing but its key decides, that evaluation has none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax import linen
from lnssm_jax.mixers import LRN, LinearAttention, NormalizedAttention, SoftmaxAttention
from lnssm_jax.models import Block, LanguageModel, ModelConfig, VisionConfig, VisionModel, layers
from lnssm_jax.models import dropout as model_dropout
from lnssm_jax.models.dropout import ModelDropout
from lnssm_jax.models.vision_model import Bidirectional, VisionBlock
from lnssm_jax.ops.core.dropout import fold, row_keys, token_keys
from tests.mixers.helpers import drawn, split
from tests.ops.test_dropout import factors

KEY = jax.random.key(3)
TOKENS = jnp.arange(24).reshape(2, 12)
SIZES = {"vocab_size": 24, "dim": 8, "num_layers": 3, "num_heads": 2}
RATES = {"embedding_dropout": 0.2, "residual_dropout": 0.2, "drop_path": 0.2}


@functools.cache
def params_of(mixer):
  build = lambda: LanguageModel(**SIZES, mixer=mixer, rngs=nnx.Rngs(0))
  return split(drawn(build))[1]


def model(mixer="lrn", **options):
  """Equal parameters whatever the options."""
  build = lambda: LanguageModel(**SIZES, mixer=mixer, rngs=nnx.Rngs(0), **options)
  return nnx.merge(split(jax.eval_shape(build))[0], params_of(mixer))


@jax.jit
def run(lm, key=None):
  return lm(TOKENS, dropout_key=key)[0]


@pytest.mark.slow
def test_key_alone_decides_and_none_drops_nothing():
  plain, lm = model(), model(**RATES)
  np.testing.assert_array_equal(run(lm), run(plain))
  np.testing.assert_array_equal(run(plain, KEY), run(plain))
  dropped = run(lm, KEY)
  assert np.abs(dropped - run(lm)).max() > 1e-3
  assert np.abs(dropped - run(lm, jax.random.key(4))).max() > 1e-3
  rows = jnp.stack([jax.random.fold_in(KEY, row) for row in range(2)])
  np.testing.assert_array_equal(run(lm, rows), dropped)


@pytest.mark.parametrize("name", RATES)
def test_each_rate_alone_drops(name):
  lm = model(**{name: 0.5})
  assert lm.has_dropout and not model().has_dropout
  assert np.abs(run(lm, KEY) - run(lm)).max() > 1e-3


def test_calls_with_auxiliary_outputs_have_dropout(monkeypatch):
  """Both that training reads."""
  given, of = [], ModelDropout.of

  def recorded(name, key, *sizes):
    given.append(key is not None)
    return of(name, key, *sizes)

  monkeypatch.setattr(ModelDropout, "of", recorded)
  lm = model(**RATES)
  for call in (lm.with_aux, lm.hidden_and_aux):
    jax.eval_shape(lambda call=call: call(TOKENS, dropout_key=KEY))
  assert given == [True, True]


def gradients(lm):
  loss = lambda lm: jnp.sum(jnp.sin(lm(TOKENS, dropout_key=KEY)[0]))
  return jax.jit(lambda lm: split(jax.grad(loss, allow_int=True)(lm))[1])(lm)


@pytest.mark.parametrize(
  "options",
  [{"remat": "full"}, pytest.param({"remat": "dots", "unroll": 3}, marks=pytest.mark.slow)],
  ids=repr,
)
def test_rematerialization_and_unrolling_same_masks(options):
  want, got = (gradients(model("lrn", **RATES, **other)) for other in ({}, options))
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * np.abs(y).max())


@pytest.mark.slow
def test_pattern_drops_as_its_layers_one_by_one():
  """Each layer has the masks of its own number, whatever the pattern is."""
  lm = model(("lrn", "lrn"), **RATES)

  @jax.jit
  def one_by_one(lm):
    drops = ModelDropout.of("test", KEY, 2, 3, RATES["drop_path"])
    x = lm.embed(TOKENS) * factors_of(drops.embedding, 12, 8, RATES["embedding_dropout"])
    for layer, block in enumerate(layers.apart(lm.blocks, 3)):
      x, _ = block(x, dropout=jax.tree.map(lambda leaf, n=layer: leaf[n], drops.layers))
    return lm.logits(lm.norm(x, dtype=lm.dtype))

  np.testing.assert_allclose(run(lm, KEY), one_by_one(lm), rtol=1e-4, atol=1e-5)


def test_every_place_of_every_layer_draws_with_keys_of_its_own(monkeypatch):
  """No mask is that of another place, layer, row or token, in the model and in a pattern."""
  drawn_with = []

  def recorded(function):
    def record(x, keys, rate):
      drawn_with.append(np.asarray(keys).reshape(-1, 2))
      return function(x, keys, rate)

    return record

  class Keyed(LRN):
    def _mix_dropping(self, x, state, segment_ids, dropout_key):
      drawn_with.append(np.asarray(dropout_key))
      return jnp.zeros_like(x), state

  for name in ("dropout", "drop_rows"):
    function = recorded(getattr(model_dropout, name))
    monkeypatch.setattr(model_dropout, name, function)
  drops = ModelDropout.of("test", KEY, 2, 3, RATES["drop_path"])
  layer_of = lambda number: jax.tree.map(lambda leaf: leaf[number], drops.layers)
  sizes = {"dim": 8, "num_heads": 2, "num_layers": 3, "residual_dropout": 0.2}
  config = ModelConfig(**sizes, vocab_size=3, channel_mixer="identity")
  block = Block(config, mixer=Keyed, mixer_options={}, layer=0, rngs=nnx.Rngs(0))
  drawn_with.append(np.asarray(token_keys(drops.embedding, 5)).reshape(-1, 2))
  for number in range(3):
    block(jnp.ones((2, 5, 8)), dropout=layer_of(number))
  assert [len(keys) for keys in drawn_with] == [10, *[2, 10, 2, 10, 2] * 3]
  keys = np.concatenate(drawn_with)
  assert len(np.unique(keys, axis=0)) == len(keys)

  drawn_with.clear()
  config = VisionConfig(**sizes, mixer=Keyed, num_classes=3)
  VisionBlock(config, 0, rngs=nnx.Rngs(0))(jnp.ones((2, 5, 8)), layer_of(0))
  assert [len(keys) for keys in drawn_with] == [2, 2, 10, 2]  # the mixer in two directions
  directions = [fold(layer_of(0).in_mixer(), number) for number in (1, 0)]
  np.testing.assert_array_equal(np.concatenate(drawn_with[:2]), np.concatenate(directions))
  keys = np.concatenate(drawn_with)
  assert len(np.unique(keys, axis=0)) == len(keys)


def factors_of(rows, length, width, rate):
  """The multipliers of values [B, T, D] of rows' keys."""
  one = lambda row, t, d: jax.random.key_data(
    jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(row), t), d)
  )[0]
  of_all = jax.vmap(jax.vmap(jax.vmap(one, (None, None, 0)), (None, 0, None)), (0, None, None))
  bits = of_all(rows, jnp.arange(length), jnp.arange(width))
  return jnp.where((bits >> 8) / 2**24 >= rate, 1 / (1 - rate), 0)


@pytest.mark.parametrize(("name", "rate"), [("residual", 0.25), ("path", 0.6)])
def test_branch_is_dropped_or_scaled(name, rate):
  """Without a channel mixer a block adds one branch: each value, or each row, is lost or scaled."""
  sizes = {"vocab_size": 3, "dim": 8, "num_layers": 1, "mixer": "lrn", "channel_mixer": "none"}
  config = ModelConfig(**sizes, residual_dropout=rate if name == "residual" else 0.0)
  block = Block(config, mixer="lrn", mixer_options={}, layer=0, rngs=nnx.Rngs(0))
  x, run = jax.random.normal(KEY, (200, 5, 8)), jax.jit(lambda x, layer: block(x, dropout=layer)[0])
  drops = ModelDropout.of("test", KEY, 200, 1, rate if name == "path" else 0.0)
  layer = jax.tree.map(lambda leaf: leaf[0], drops.layers)
  ratio = np.asarray((run(x, layer) - x) / (run(x, None) - x))
  lost = np.abs(ratio) < 1e-2
  if name == "path":
    assert np.all(lost == lost[:, :1, :1])
    lost, ratio = lost[:, 0, 0], ratio[:, 0, 0]
  np.testing.assert_allclose(np.median(ratio[~lost]), 1 / (1 - rate), rtol=1e-4)
  assert abs(lost.mean() - rate) < 5 * (rate * (1 - rate) / lost.size) ** 0.5


def test_drop_path_rises_linearly():
  of = lambda layers: ModelDropout.of("test", KEY, 2, layers, 0.3).layers
  np.testing.assert_allclose(of(4).drop_path, [0, 0.1, 0.2, 0.3], atol=1e-7)
  np.testing.assert_allclose(of(1).drop_path, [0.3], atol=1e-7)
  assert len(np.unique(of(4).keys.reshape(-1, 2), axis=0)) == 8


ATTENTIONS = [
  (NormalizedAttention, {}),
  (LinearAttention, {}),
  (LinearAttention, {"feature_map": "identity"}),
]


def weights(layer, x, seen):
  """Of the values in linear or normalized attention, [B, H, T, T], without dropout."""
  q, k = (x @ p.kernel[...] + p.bias[...] for p in (layer.q_proj, layer.k_proj))
  q, k = (z.reshape(*x.shape[:2], layer.num_heads, -1) for z in (q, k))
  if layer_maps := getattr(layer, "feature_map", None) == "elu":
    q, k = (jax.nn.elu(z) + 1 for z in (q, k))
  scores = jnp.einsum("bthk,bshk->bhts", q, k) * seen
  if layer_maps:
    return scores / scores.sum(-1, keepdims=True)
  if isinstance(layer, LinearAttention):
    return scores
  eta = jnp.exp(x @ layer.eta_proj.kernel[...] + layer.eta_proj.bias[...])
  return scores / eta.transpose(0, 2, 1)[..., None]


def formula(layer, x, seen, kept):
  v = (x @ layer.v_proj.kernel[...] + layer.v_proj.bias[...]).reshape(*x.shape[:2], 2, 4)
  y = jnp.einsum("bhts,bshv->bthv", weights(layer, x, seen) * kept, v)
  return y.reshape(x.shape) @ layer.o_proj.kernel[...] + layer.o_proj.bias[...]


@pytest.mark.parametrize(("mixer", "options"), ATTENTIONS)
def test_linear_attention_dropout_equals_the_formula(mixer, options):
  """Each weight of a value is dropped alone, with documents; values and all gradients, float64."""
  T, H, rate = 10, 2, 0.3
  ids = np.repeat([[0, 1], [0, 2]], [4, 6], axis=1)
  seen = np.tril(ids[:, :, None] == ids[:, None])[:, None]
  kept = (np.asarray(factors(2, T, H, T)).transpose(0, 2, 1, 3) > 0) / (1 - rate)

  def dropped(layer, x):
    y, state = layer(x, segment_ids=jnp.asarray(ids), dropout_key=KEY)
    return y, (state, layer(x, segment_ids=jnp.asarray(ids))[0])

  def run(fn):
    def loss(layer, x):
      y, rest = fn(layer, x)
      return jnp.sin(y).sum(), (y, rest)

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(layer, x)

  with jax.enable_x64(True):
    wide = {"dtype": jnp.float64, "param_dtype": jnp.float64, "num_heads": H} | options
    layer = drawn(lambda: mixer(8, attention_dropout=rate, **wide, rngs=nnx.Rngs(0)))
    layer = jax.tree.map(lambda p: np.asarray(p) + 0.1, layer)
    x = jax.random.normal(jax.random.key(1), (2, T, 8), jnp.float64)
    got, (y, (state, plain)) = run(dropped)
    want, (want_y, _) = run(lambda layer, x: (formula(layer, x, seen, kept), None))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      np.testing.assert_allclose(a, b, rtol=0, atol=1e-11 * (1 + np.abs(b).max()))

    np.testing.assert_allclose(y, want_y, rtol=0, atol=1e-11 * abs(y).max())
    assert np.abs(y - plain).max() > 1e-3
    with pytest.raises(NotImplementedError, match=rf"{mixer.__name__}: a state with attention_dr"):
      layer(x, state, dropout_key=KEY)


def test_both_directions_drop_with_keys_of_their_own():
  new = lambda: SoftmaxAttention(8, num_heads=2, attention_dropout=0.5, rngs=nnx.Rngs(0))
  mixer, x, rows = new(), jax.random.normal(KEY, (2, 6, 8)), row_keys("test", KEY, 2)

  @jax.jit
  def both(x):
    keys = [fold(rows, number) for number in range(2)]
    y = mixer(x[:, ::-1], dropout_key=keys[1])[0][:, ::-1]
    return (mixer(x, dropout_key=keys[0])[0] + y) / 2

  got = jax.jit(lambda x: Bidirectional(new, shared=())(x, dropout_key=rows))(x)
  np.testing.assert_allclose(got, both(x), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_vision_model_drops():
  sizes = {"image_size": 4, "patch_size": 2, "channels": 1, "num_classes": 3, "dim": 8}
  build = lambda **rates: VisionModel(
    **sizes, num_layers=2, num_heads=2, mixer="softmax_attention", rngs=nnx.Rngs(0), **rates
  )
  images = jax.random.normal(KEY, (2, 4, 4, 1))
  call = jax.jit(lambda vm, key=None: vm(images, dropout_key=key))
  want = call(build())
  for rates in [{name: 0.5} for name in RATES] + [{"mixer_options": {"attention_dropout": 0.5}}]:
    vm = build(**rates)
    np.testing.assert_array_equal(call(vm), want)
    assert np.abs(call(vm, KEY) - want).max() > 1e-5, rates


@pytest.mark.slow
def test_linen_face_drops_with_a_key_of_its_stream():
  face = linen.LanguageModel(**SIZES, mixer="lrn", **RATES)
  variables = {"params": params_of("lrn")}
  call = jax.jit(lambda **rngs: face.apply(variables, TOKENS, **rngs)[0])
  np.testing.assert_allclose(call(), run(model()), rtol=1e-5, atol=1e-5)
  dropped = call(rngs={"dropout": KEY})
  assert np.abs(dropped - call()).max() > 1e-3
  np.testing.assert_array_equal(call(rngs={"dropout": KEY}), dropped)


@pytest.mark.parametrize("name", RATES)
def test_wrong_rate_rejected(name):
  with pytest.raises(ValueError, match=rf"{name}=1\.0 is the probability"):
    jax.eval_shape(lambda: LanguageModel(**SIZES, mixer="lrn", **{name: 1.0}, rngs=nnx.Rngs(0)))


def test_wrong_rate_of_a_mixer_or_key_rejected():
  for mixer in (SoftmaxAttention, NormalizedAttention, LinearAttention):
    with pytest.raises(ValueError, match=r"attention_dropout=-1 is the probability"):
      mixer(8, num_heads=2, attention_dropout=-1, rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match=r"LanguageModel: dropout_key has dtype float32"):
    model(**RATES)(TOKENS, dropout_key=jnp.zeros(2))
