"""The image classifier: sizes, directions, shared projections, what it is told wrongly."""

from typing import ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import LRN, MIXERS
from lnssm_jax.mixers.common.norms import Norm
from lnssm_jax.models import VisionModel, count_parameters
from lnssm_jax.models.vision_model import SHARED, Bidirectional, patches
from tests.mixers.helpers import drawn, relative_error, split

SMALL = {"image_size": 6, "patch_size": 2, "num_classes": 3, "dim": 8, "num_layers": 2}


@pytest.mark.parametrize(
  ("mixer", "dim", "count"),
  [
    ("longhorn", 192, 6_853_096),
    ("longhorn", 384, 25_206_760),
    ("mamba", 192, 7_148_008),
    ("mamba", 384, 25_796_584),
  ],
)
def test_models_of_the_papers_have_their_sizes(mixer, dim, count):
  """7M and 26M parameters in Vim and ViL: 24 layers for images of 224 in patches of 16."""
  sizes = {"image_size": 224, "patch_size": 16, "num_classes": 1000, "num_layers": 24}
  build = lambda: VisionModel(**sizes, dim=dim, mixer=mixer, rngs=nnx.Rngs(0))
  assert count_parameters(jax.eval_shape(build)) == count


def test_images_may_be_wider_than_high():
  sizes = SMALL | {"image_size": (4, 8), "num_layers": 1, "mixer": "lrn"}
  model = VisionModel(**sizes, rngs=nnx.Rngs(0))
  assert model.positions.shape == (2 * 4 + 1, 8)
  assert jax.eval_shape(model, jnp.ones((3, 4, 8, 3))).shape == (3, 3)
  with pytest.raises(ValueError, match=r"images has shape \(3, 8, 4, 3\)"):
    model(jnp.ones((3, 8, 4, 3)))


def test_patches_are_squares_by_rows():
  image = jnp.arange(2 * 4 * 6 * 3.0).reshape(2, 4, 6, 3)
  got = patches(image, 2)
  assert got.shape == (2, 6, 12)
  np.testing.assert_array_equal(got[1, 4], image[1, 2:4, 2:4].reshape(-1))


@pytest.mark.slow
def test_bidirectional_shares_projections_only():
  def build(rngs):
    return Bidirectional(lambda: MIXERS["longhorn"](8, state_dim=3, rngs=rngs), shared=SHARED)

  graph, params = split(drawn(lambda: build(nnx.Rngs(0))))
  assert set(params["forward"]) - set(params["backward"]) == set(SHARED)
  x = jax.random.normal(jax.random.key(0), (2, 5, 8))
  alone = split(MIXERS["longhorn"](8, state_dim=3, rngs=nnx.Rngs(0)))[0]
  run = jax.jit(lambda params, x: nnx.merge(alone, params)(x)[0])
  backward = params["backward"] | {name: params["forward"][name] for name in SHARED}
  want = (run(params["forward"], x) + run(backward, x[:, ::-1])[:, ::-1]) / 2
  both = jax.jit(lambda params, x: nnx.merge(graph, params)(x))
  got = both(params, x)
  assert relative_error(got, want) < 1e-6
  moved = both(params, x.at[:, -1].add(1.0))  # a later patch reaches an earlier one
  assert not np.allclose(moved[:, 0], got[:, 0])


def test_bidirectional_reads_padded_rows_backward_from_their_own_ends():
  build = lambda: Bidirectional(lambda: MIXERS["lrn"](8, rngs=nnx.Rngs(0)), shared=())
  layer, lengths = drawn(build), np.array([5, 3, 0])
  x = jax.random.normal(jax.random.key(0), (3, 5, 8))
  x = jnp.where(jnp.arange(5)[:, None] < lengths[:, None, None], x, jnp.nan)

  @jax.jit
  def run(layer, x, lengths):
    loss = lambda layer: (jnp.sum(jnp.sin(y := layer(x, lengths=lengths))), y)
    return jax.grad(loss, has_aux=True)(layer)

  gradients, y = run(layer, x, lengths)
  chex.assert_tree_all_finite(gradients)
  alone = jax.jit(lambda layer, x: layer(x))
  for row, length in enumerate(lengths):
    assert not y[row, length:].any()
    if length:
      assert relative_error(y[row, :length], alone(layer, x[row : row + 1, :length])[0]) < 2e-6
  with pytest.raises(ValueError, match=r"Bidirectional: lengths has the value 6.*from 0 to T=5"):
    layer(x, lengths=np.array([1, 6, 1]))


def test_logits_are_those_of_the_class_token_between_the_halves_of_the_patches():
  """With patches, token and positions of chosen numbers, by the parts of the model."""

  @jax.jit
  def both(model):
    images = jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
    x = model.patch_embedding(patches(images, 2))
    token = jnp.broadcast_to(model.class_token[...], (2, 1, 8))
    x = jnp.concatenate([x[:, :8], token, x[:, 8:]], axis=1) + model.positions[...]
    for layer in range(2):
      x = jax.tree.map(lambda leaf: leaf[layer], model.blocks)(x)  # noqa: B023
    return model(images), model.head(model.norm(x[:, 8]))

  build = lambda: VisionModel(**SMALL | {"image_size": 8}, rngs=nnx.Rngs(0))
  got, want = both(drawn(build))
  assert relative_error(got, want) < 1e-5


class Numbered(LRN):
  """Its parameters are the number of its layer and a random one; it records its inputs' dtypes."""

  set_by_model = ("layer", "num_layers")
  dtypes: ClassVar[list] = []

  def __init__(self, dim, *, layer, num_layers, dtype, param_dtype, rngs):
    self.dim, self.dtype = dim, dtype
    self.number = nnx.Param(jnp.asarray([layer, num_layers], jnp.float32))
    self.drawn = nnx.Param(jax.random.normal(rngs.params()))

  def _mix(self, x, state, segment_ids):
    self.dtypes.append(x.dtype)
    return x, state


def test_layers_and_directions_start_from_their_own_key_and_number():
  sizes = SMALL | {"num_layers": 3, "dim": 64}
  build = lambda: VisionModel(**sizes, mixer=Numbered, norm_eps=1e-3, rngs=nnx.Rngs(0))
  model = jax.jit(build)()
  mixers = model.blocks.mixer.forward, model.blocks.mixer.backward
  for mixer in mixers:
    np.testing.assert_array_equal(mixer.number[...], [[0, 3], [1, 3], [2, 3]])
  assert len(np.unique([mixer.drawn[...] for mixer in mixers])) == 6
  assert (model.norm.eps, model.blocks.norm.eps) == (1e-3, 1e-3)
  for leaf in (model.class_token, model.positions, model.head.kernel, model.patch_embedding.kernel):
    assert 0.015 < float(jnp.std(leaf[...])) < 0.025


@pytest.mark.parametrize(
  ("dtype", "param_dtype"), [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16)]
)
def test_residual_stream_has_the_dtype_of_the_model_and_the_head_float32(
  dtype, param_dtype, monkeypatch
):
  read = []

  def recorded(self, x, added, dtype=None):
    read.append(x.dtype)
    return add(self, x, added, dtype)

  add = Norm.add
  monkeypatch.setattr(Norm, "add", recorded)
  options = {"mixer": Numbered, "dtype": dtype, "param_dtype": param_dtype}
  model = jax.eval_shape(lambda: VisionModel(**SMALL, **options, rngs=nnx.Rngs(0)))
  head = []
  monkeypatch.setattr(nnx.Linear, "__call__", head_of(nnx.Linear.__call__, head))
  logits = jax.eval_shape(lambda model: model(jnp.ones((1, 6, 6, 3))), model)
  assert logits.dtype == jnp.float32
  assert set(read) == {jnp.dtype(dtype)}
  assert head[-1] == jnp.float32  # what the last norm gives the head


def head_of(call, dtypes):
  """A linear layer's call, which records the dtype of its input."""

  def recorded(self, x):
    dtypes.append(x.dtype)
    return call(self, x)

  return recorded


@pytest.mark.parametrize("mixer", ["longhorn", pytest.param("lnssm", marks=pytest.mark.slow)])
def test_model_classifies_and_has_gradients(mixer):
  build = lambda: VisionModel(**SMALL, num_heads=2, mixer=mixer, rngs=nnx.Rngs(0))
  model = drawn(build)
  images = jax.random.normal(jax.random.key(0), (4, 6, 6, 3))
  loss = lambda model: jnp.square(model(images) - 1).mean()
  logits = jax.eval_shape(lambda model: model(images), model)
  assert (logits.shape, logits.dtype) == ((4, 3), jnp.float32)
  gradients = jax.jit(jax.grad(loss))(model)
  chex.assert_tree_all_finite(gradients)
  assert gradients.class_token[...].any() and gradients.positions[...].any()


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"patch_size": 4}, "image_size=6 is not a multiple of patch_size=4"),
    ({"image_size": (6, 5)}, r"image_size=\(6, 5\) is not a multiple of patch_size=2"),
    ({"image_size": (6, 6, 6)}, r"image_size=\(6, 6, 6\) must be one number, or a height and"),
    ({"dim": 0}, "dim=0 must be an integer of at least 1"),
    ({"mixer": "longhorm"}, "mixer='longhorm' is unknown; did you mean 'longhorn'"),
    ({"mixer": "lnssm"}, "num_heads=None: mixer 'lnssm' has heads"),
    ({"mixer_options": {"state": 3}}, "option='state' is unknown; did you mean 'state_dim'"),
  ],
)
def test_bad_options_raise_and_are_named(options, message):
  with pytest.raises(ValueError, match=message):
    VisionModel(**SMALL | options, rngs=nnx.Rngs(0))


def test_images_of_another_size_raise():
  model = jax.eval_shape(lambda: VisionModel(**SMALL, rngs=nnx.Rngs(0)))
  with pytest.raises(ValueError, match=r"images has shape \(1, 8, 6, 3\)"):
    jax.eval_shape(lambda: model(jnp.zeros((1, 8, 6, 3))))
