"""An image classifier: a sequence of patches, mixed in both directions by any mixer.

The layout is Vim's and ViL's: a class token in the middle of the patches, learned positions, and in
each block a forward and a backward mixer whose mean is added to the residual stream.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers import Mixer
from lnssm_jax.mixers.common.checks import check_choice, check_positive, check_rngs
from lnssm_jax.mixers.common.lengths import checked_lengths, flipped, without_padding
from lnssm_jax.models.block import NORMS, check_mixer, make_mixer
from lnssm_jax.models.dropout import AFTER_MIXER, LayerDropout, ModelDropout
from lnssm_jax.models.layers import REMAT_POLICIES
from lnssm_jax.ops.core.checks import check_floating, check_shape
from lnssm_jax.ops.core.dropout import check_rate, dropout, fold, token_keys
from lnssm_jax.ops.core.explicit_axes import under_auto_axes

# Submodules that the two directions share, if a mixer has them: the projections in and out.
SHARED = ("in_proj", "o_proj")


class Bidirectional(nnx.Module):
  """(mixer(x) + flip(mixer'(flip(x)))) / 2: [B, T, D] -> [B, T, D], without a state.

  The two mixers, both built by `new`, have parameters of their own but for the submodules in
  `shared`, which are the first's.
  """

  def __init__(self, new: Callable[[], Mixer], *, shared: Sequence[str]):
    self.forward = new()
    own = nnx.to_pure_dict(nnx.state(new(), nnx.Param))
    self.backward = _parameters({name: own[name] for name in own if name not in shared})

  def __call__(
    self,
    x: jax.Array,
    *,
    lengths: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
  ) -> jax.Array:
    """The mean of both directions, [B, T, D]; the key is [B, 2] uint32, of the rows.

    `lengths` [B], integers from 0 to T, are those of rows padded on the right: each is read
    backward from its own last token, and the result is 0 at padding, which may hold anything.

    Raises:
      ValueError: `lengths` have another shape or dtype, or one is known to be outside.
    """
    ends = None
    if lengths is not None:
      ends = checked_lengths("Bidirectional", lengths, x, None, None)
    x = without_padding(x, ends)
    graph, params = nnx.split(self.forward, nnx.Param)
    own = nnx.to_pure_dict(nnx.state(self.backward, nnx.Param))
    backward: Any = nnx.merge(graph, nnx.to_pure_dict(params) | own)
    keys = [None if dropout_key is None else fold(dropout_key, number) for number in range(2)]
    y = flipped(backward(flipped(x, ends), dropout_key=keys[1])[0], ends)
    return without_padding((self.forward(x, dropout_key=keys[0])[0] + y) / 2, ends)


def _parameters(tree: Mapping[str, Any]) -> nnx.Dict:
  """A nested dictionary of arrays as one of parameters."""
  inner = lambda leaf: _parameters(leaf) if isinstance(leaf, Mapping) else nnx.Param(leaf)
  return nnx.Dict({name: inner(leaf) for name, leaf in tree.items()})


class VisionBlock(nnx.Module):
  """x + bidirectional(norm(x))."""

  def __init__(
    self,
    mixer: str | type[Mixer],
    dim: int,
    *,
    norm: str,
    norm_eps: float,
    residual_dropout: float,
    **options,
  ):
    self.dtype = options["dtype"]
    self.residual_dropout = check_rate("residual_dropout", residual_dropout)
    of_norm = {"param_dtype": options["param_dtype"], "rngs": options["rngs"]}
    self.norm = NORMS[norm](dim, eps=norm_eps, **of_norm)
    self.mixer = Bidirectional(lambda: make_mixer(mixer, dim, **options), shared=SHARED)

  def __call__(self, x: jax.Array, dropout: LayerDropout | None = None) -> jax.Array:
    y, x = self.norm.add(x, None, self.dtype)
    if dropout is None:
      return x + self.mixer(y)
    y = self.mixer(y, dropout_key=dropout.in_mixer())
    return x + dropout.branch(y, AFTER_MIXER, self.residual_dropout)


class VisionModel(nnx.Module):
  """Images [B, height, width, channels] -> logits [B, num_classes] float32.

      patches W + b, a class token put before patch P / 2, + positions -> num_layers blocks
      -> norm -> the class token W + b

  Args:
    image_size: of both sides, or (height, width); multiples of `patch_size`.
    patch_size, channels: a patch is `patch_size`^2 `channels` numbers; there are P of them.
    dim, num_layers, num_heads, mixer, mixer_options: as for `LanguageModel`, with one mixer; ViL-T
      has dim=192, ViL-S 384, both 24 layers and patches of 16 in images of 224.
    norm, norm_eps, embedding_dropout, residual_dropout, drop_path, remat: as there.
    dtype: of matrix products and the residual stream; norms and logits are float32.

  Raises:
    ValueError: a size is wrong or a name is unknown; the message says which.

  Sources: Vim (Zhu et al. 2024), section 3; with Longhorn, ViL: Longhorn (Liu et al. 2024),
  appendix. Token, positions and kernels outside the mixers start normal with a deviation of 0.02.
  """

  def __init__(
    self,
    *,
    image_size: int | tuple[int, int],
    patch_size: int,
    num_classes: int,
    dim: int,
    num_layers: int,
    channels: int = 3,
    num_heads: int | None = None,
    mixer: str | type[Mixer] = "longhorn",
    mixer_options: Mapping[str, Any] | None = None,
    norm: str = "rms",
    norm_eps: float = 1e-5,
    embedding_dropout: float = 0.0,
    residual_dropout: float = 0.0,
    drop_path: float = 0.0,
    remat: str = "none",
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    check_rngs("VisionModel", rngs)
    sides = image_size if isinstance(image_size, tuple | list) else (image_size, image_size)
    if len(sides) != 2:
      raise ValueError(f"image_size={image_size} must be one number, or a height and a width.")
    sizes = {"patch_size": patch_size, "num_classes": num_classes, "dim": dim}
    sizes |= {"num_layers": num_layers, "channels": channels}
    for name, size in [*(("image_size", side) for side in sides), *sizes.items()]:
      check_positive(name, size)
    if any(side % patch_size for side in sides):
      raise ValueError(
        f"image_size={image_size} is not a multiple of patch_size={patch_size}; choose another."
      )
    options = {"num_heads": num_heads} | dict(mixer_options or {})
    check_mixer(mixer, mixer_options or {}, dim, num_heads)
    check_choice("norm", norm, NORMS)
    self.remat = check_choice("remat", remat, REMAT_POLICIES)
    self.image_size, self.patch_size, self.channels = tuple(sides), patch_size, channels
    self.dtype, self.num_layers = jnp.dtype(dtype), num_layers
    self.embedding_dropout = check_rate("embedding_dropout", embedding_dropout)
    self.drop_path = check_rate("drop_path", drop_path)
    num_patches = math.prod(side // patch_size for side in sides)

    normal = nnx.initializers.normal(0.02)
    linear = lambda inputs, outputs, dtype: nnx.Linear(
      inputs, outputs, kernel_init=normal, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )
    self.patch_embedding = linear(patch_size**2 * channels, dim, dtype)
    self.class_token = nnx.Param(normal(rngs.params(), (dim,), param_dtype))
    self.positions = nnx.Param(normal(rngs.params(), (num_patches + 1, dim), param_dtype))

    def block(key, layer):
      return VisionBlock(
        mixer,
        dim,
        norm=norm,
        norm_eps=norm_eps,
        residual_dropout=residual_dropout,
        layer=layer,
        num_layers=num_layers,
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=nnx.Rngs(key),
        **options,
      )

    keys = jax.random.split(rngs.params(), num_layers)
    self.blocks = jax.vmap(block)(keys, jnp.arange(num_layers))
    self.norm = NORMS[norm](dim, eps=norm_eps, param_dtype=param_dtype, rngs=rngs)
    self.head = linear(dim, num_classes, jnp.float32)

  @under_auto_axes(argument=1)
  def __call__(self, images: jax.Array, *, dropout_key: jax.Array | None = None) -> jax.Array:
    """Logits [B, num_classes] float32 of images [B, height, width, channels], floating point.

    `dropout_key` is a key, or one for each row [B], for training; None drops nothing.
    """
    shape = (None, *self.image_size, self.channels)
    check_shape("VisionModel", "images", images, shape, "[B, height, width, channels]")
    check_floating("VisionModel", "images", images)
    x = self.patch_embedding(patches(images, self.patch_size).astype(self.dtype))
    B, P, D = x.shape
    token = jnp.broadcast_to(self.class_token[...].astype(self.dtype), (B, 1, D))
    x = jnp.concatenate([x[:, : P // 2], token, x[:, P // 2 :]], axis=1)
    x = x + self.positions[...].astype(self.dtype)

    drops = ModelDropout.of("VisionModel", dropout_key, B, self.num_layers, self.drop_path)
    if drops is not None:
      x = dropout(x, token_keys(drops.embedding, P + 1), self.embedding_dropout)

    layer = lambda x, inputs: (inputs[0](x, inputs[1]), None)
    if (policy := REMAT_POLICIES[self.remat]) is not None:
      layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    x, _ = jax.lax.scan(layer, x, (self.blocks, None if drops is None else drops.layers))
    return self.head(self.norm(x[:, P // 2]))


def patches(images: jax.Array, size: int) -> jax.Array:
  """[B, H, W, C] -> [B, H W / size^2, size^2 C], patches by rows, as are a patch's pixels."""
  B, H, W, C = images.shape
  x = images.reshape(B, H // size, size, W // size, size, C)
  return x.transpose(0, 1, 3, 2, 4, 5).reshape(B, -1, size * size * C)
