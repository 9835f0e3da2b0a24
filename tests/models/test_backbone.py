"""Models without a vocabulary: both directions, rows of any length, resets, cross-attention."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax import linen, mixers, models
from lnssm_jax.models.settings import params_of

B, T, D = 2, 6, 8
SIZES = {"dim": D, "num_layers": 2, "mixer": "lrn", "channel_mixer": "none"}
RNG = np.random.default_rng(0)
X = RNG.standard_normal((B, T, D)).astype(np.float32)


def drawn(cls, **settings):
  """A model whose parameters are random numbers, which NumPy draws."""
  build = lambda: cls(**SIZES | settings, rngs=nnx.Rngs(0))
  graph, shapes = nnx.split(jax.eval_shape(build))
  draw = lambda x: (0.5 * RNG.standard_normal(x.shape)).astype(x.dtype)
  return nnx.merge(graph, jax.tree.map(draw, shapes))


def test_causal_backbone_is_the_stack_of_a_language_model():
  lm = drawn(models.LanguageModel, vocab_size=7, embedding_norm=False)
  backbone = drawn(models.Backbone)
  backbone.blocks, backbone.norm = lm.blocks, lm.norm
  reset = np.zeros((T, B), bool)
  reset[4, 0] = True  # what follows the fourth token of the first row is a sequence of its own
  ids = np.array([[0] * 4 + [1] * 2, [0] * 6])

  @jax.jit
  def run(lm, backbone):
    def one(state, inputs):
      x, reset = inputs
      y, state = mixers.step(backbone, x, state, reset=reset)
      return state, y

    broken = jax.tree.map(lambda s: s.at[:, 0].set(jnp.nan), backbone.init_state(B))
    first = jnp.array([[True, False]])
    steps = jnp.swapaxes(X, 0, 1), jnp.concatenate([first, reset[1:]])
    stepped = jax.lax.scan(one, broken, steps)[1]
    return lm.hidden(X), backbone(X), backbone(X, segment_ids=ids)[0], jnp.swapaxes(stepped, 0, 1)

  want, got, packed, stepped = run(lm, backbone)
  jax.tree.map(np.testing.assert_array_equal, got, want)
  np.testing.assert_allclose(stepped, packed, atol=2e-6)
  with pytest.raises(ValueError, match=r"reset is bool \[3\], but bool \[2\]"):
    mixers.step(backbone, X[:, 0], reset=jnp.ones(3, bool))


def test_both_directions_read_all_of_each_sequence_and_nothing_else():
  backbone = drawn(models.Backbone, direction="both")
  face = linen.Backbone(**SIZES, direction="both")
  padded = np.where(np.arange(T)[:, None] < np.array([4, 6])[:, None, None], X, np.nan)
  ids = np.array([[0] * 4 + [1] * 2] * 2)

  @jax.jit
  def run(model, params):
    found = [model(X), model(padded, lengths=jnp.array([4, 6])), model(X[:, :4])]
    return [*found, model(X, segment_ids=ids), face.apply({"params": params}, X)]

  found = run(backbone, params_of(backbone))
  whole, got, alone, packed, of_face = (y for y, _ in found)
  assert all(state is None for _, state in found) and backbone.init_state(B) is None
  np.testing.assert_allclose(got[0, :4], alone[0], atol=2e-6)
  np.testing.assert_allclose(got[1], whole[1], atol=2e-6)
  assert not got[0, 4:].any()
  np.testing.assert_allclose(packed[:, :4], alone, atol=2e-6)
  assert np.abs(packed[0, 0] - whole[0, 0]).max() > 1e-3  # the first token sees the last
  np.testing.assert_allclose(of_face, whole, atol=2e-6)
  with pytest.raises(ValueError, match="state is given, but with direction='both'"):
    backbone(X, X)
  with pytest.raises(ValueError, match="layers of HGRN share"):
    shared = {"mixer": "hgrn", "mixer_options": {"lower_bound": "shared"}}
    jax.eval_shape(lambda: models.Backbone(**SIZES | shared, direction="both", rngs=nnx.Rngs(0)))


def test_cross_attention_and_its_gradients_equal_float64():
  """Of contexts of two lengths, one of them 0, whose padding is NaN and has no gradient."""
  layer = models.CrossAttention(D, num_heads=2, context_dim=5, rngs=nnx.Rngs(0))
  graph, params = nnx.split(layer)
  context, cotangent = RNG.standard_normal((B, 3, 5)), RNG.standard_normal(X.shape)
  lengths = np.array([2, 0])

  def value_and_grads(run, *args):
    value, back = jax.vjp(run, *args)
    return value, back(cotangent.astype(value.dtype))

  def formula(params, x, context):
    kernel = lambda name: params[f"{name}_proj"]["kernel"][...]
    q, k, v = x[0] @ kernel("q"), context[0, :2] @ kernel("k"), context[0, :2] @ kernel("v")
    heads = []
    for part in (slice(0, 4), slice(4, 8)):
      scores = jnp.exp(q[:, part] @ k[:, part].T / 2)
      heads.append(scores / scores.sum(-1, keepdims=True) @ v[:, part])
    out = jnp.concatenate(heads, 1) @ kernel("o")
    return jnp.stack([out, jnp.zeros_like(out)])

  padded = context.astype(np.float32)
  padded[0, 2:] = padded[1] = np.nan
  run = lambda params, x, context: nnx.merge(graph, params)(x, context, context_lengths=lengths)
  got = jax.jit(lambda *args: value_and_grads(run, *args))(params, X, padded)
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, X, context))
    want = jax.device_get(value_and_grads(formula, *wide))
  chex.assert_trees_all_close(jax.device_get(got), want, atol=4e-6)
  assert not got[0][1].any() and not got[1][2][0, 2:].any() and not got[1][2][1].any()


def test_redraw_uses_the_initializer_for_kernels_only():
  backbone = drawn(models.Backbone, channel_mixer="swiglu")
  before = params_of(backbone)
  mixers.redraw(
    backbone,
    nnx.initializers.constant(2.0),
    output_init=nnx.initializers.orthogonal(),
    rngs=nnx.Rngs(1),
  )
  after = params_of(backbone)["blocks"]
  assert (after["mixer"]["i_proj"]["kernel"] == 2).all()
  for name in ("mixer", "channel_mixer"):
    own = after[name]["o_proj" if name == "mixer" else "down"]["kernel"]
    gram = own @ own.mT if own.shape[1] < own.shape[2] else own.mT @ own
    np.testing.assert_allclose(gram, np.broadcast_to(np.eye(D), gram.shape), atol=1e-5)
  assert (own[0] != own[1]).any()  # each layer by itself
  np.testing.assert_array_equal(
    after["mixer_norm"]["scale"], before["blocks"]["mixer_norm"]["scale"]
  )
