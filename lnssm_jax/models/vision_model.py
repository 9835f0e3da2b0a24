"""An image classifier: a sequence of patches, mixed in both directions by any mixer.

The layout is Vim's and ViL's: a class token in the middle of the patches, learned positions, and in
each block a forward and a backward mixer whose mean is added to the residual stream.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.common.checks import check_rngs
from lnssm_jax.models.bidirectional import SHARED, Bidirectional
from lnssm_jax.models.block import NORMS, make_mixer
from lnssm_jax.models.config import VisionConfig
from lnssm_jax.models.dropout import AFTER_MIXER, LayerDropout, ModelDropout
from lnssm_jax.models.layers import REMAT_POLICIES
from lnssm_jax.models.options import configured
from lnssm_jax.ops.core.checks import check_floating, check_shape
from lnssm_jax.ops.core.dropout import dropout, token_keys
from lnssm_jax.ops.core.explicit_axes import under_auto_axes


class VisionBlock(nnx.Module):
  """x + bidirectional(norm(x))."""

  def __init__(self, config: VisionConfig, layer: int | jax.Array, *, rngs: nnx.Rngs):
    self.dtype, param_dtype = jnp.dtype(config.dtype), jnp.dtype(config.param_dtype)
    self.residual_dropout = config.residual_dropout
    of_norm = {"eps": config.norm_eps, "param_dtype": param_dtype, "rngs": rngs}
    self.norm = NORMS[config.norm](config.dim, **of_norm)
    place = {"layer": layer, "num_layers": config.num_layers}
    options: dict[str, Any] = {"num_heads": config.num_heads} | config.mixer_options
    options |= {"dtype": self.dtype, "param_dtype": param_dtype, "rngs": rngs}
    new = lambda: make_mixer(config.mixer, config.dim, **place, **options)
    self.mixer = Bidirectional(new, shared=SHARED)

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
    config: the settings; or they are given as keyword arguments, VisionModel(dim=8, ...).

  Raises:
    ValueError: as `VisionConfig`.

  Sources: Vim (Zhu et al. 2024), section 3; with Longhorn, ViL: Longhorn (Liu et al. 2024),
  appendix. Token, positions and kernels outside the mixers start normal with a deviation of 0.02.
  """

  @configured(VisionConfig)
  def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs) -> None:
    check_rngs("VisionModel", rngs)
    size, patch_size, dim = config.image_size, config.patch_size, config.dim
    sides = size if isinstance(size, tuple) else (size, size)
    num_layers, channels = config.num_layers, config.channels
    self.dtype, param_dtype = jnp.dtype(config.dtype), jnp.dtype(config.param_dtype)
    self.image_size, self.patch_size, self.channels = sides, patch_size, channels
    self.num_layers, self.remat = num_layers, config.remat
    self.embedding_dropout, self.drop_path = config.embedding_dropout, config.drop_path
    num_patches = math.prod(side // patch_size for side in sides)

    normal = nnx.initializers.normal(0.02)
    linear = lambda inputs, outputs, dtype: nnx.Linear(
      inputs, outputs, kernel_init=normal, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )
    self.patch_embedding = linear(patch_size**2 * channels, dim, self.dtype)
    self.class_token = nnx.Param(normal(rngs.params(), (dim,), param_dtype))
    self.positions = nnx.Param(normal(rngs.params(), (num_patches + 1, dim), param_dtype))

    block = lambda key, layer: VisionBlock(config, layer, rngs=nnx.Rngs(key))
    keys = jax.random.split(rngs.params(), num_layers)
    self.blocks = jax.vmap(block)(keys, jnp.arange(num_layers))
    of_norm = {"eps": config.norm_eps, "param_dtype": param_dtype}
    self.norm = NORMS[config.norm](dim, **of_norm, rngs=rngs)
    self.head = linear(dim, config.num_classes, jnp.float32)

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
