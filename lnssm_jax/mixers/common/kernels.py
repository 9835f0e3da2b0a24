"""Initial values of all kernels of a layer, drawn again by an initializer of one's own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

# Last layers of a branch, whose outputs the residual stream adds up.
_LAST = ("o_proj", "down")


def redraw(
  module: nnx.Module,
  kernel_init: Callable[..., jax.Array],
  *,
  output_init: Callable[..., jax.Array] | None = None,
  rngs: nnx.Rngs,
) -> None:
  """Draws the kernels of all linear layers in a mixer or model again, in place.

      mixers.redraw(mixer, nnx.initializers.orthogonal(), rngs=nnx.Rngs(1))

  Kernels that are stacked over layers are drawn one by one. Biases, norms, decays and tables stay
  as their class starts them.

  Args:
    kernel_init: an initializer of JAX or Flax: (key, (inputs, outputs), dtype) -> kernel.
    output_init: that of `o_proj` and `down`, whose outputs the residual stream adds up; None takes
      `kernel_init`.
  """
  layers: Any = nnx.iter_modules(module)
  for path, layer in layers:
    if isinstance(layer, nnx.Linear):
      last = output_init is not None and path[-1:] and path[-1] in _LAST
      init: Any = output_init if last else kernel_init
      kernel, key = layer.kernel[...], rngs.params()
      draw = lambda key, init=init, shape=kernel.shape[-2:]: init(key, shape, jnp.float32)
      if stacked := kernel.shape[:-2]:
        key = jax.random.split(key, stacked)
      for _ in stacked:
        draw = jax.vmap(draw)
      layer.kernel[...] = draw(key).astype(kernel.dtype)
