"""Layers that can run on a sequence whose steps are divided over devices."""

from typing import Any

from flax import nnx


class Divisible(nnx.Module):
  """A layer that can run on one device's part of the steps.

  `sequence_axis` is the mesh axis over which a surrounding `jax.shard_map` divides time, or None.
  `divide_time` sets it.
  """

  sequence_axis: str | None = None


def divide_time(layer: Any, axis_name: str) -> Any:
  """Makes a mixer, and all layers in it, run on parts of a sequence; returns it.

      mixer = divide_time(LNSSM(512, num_heads=4, rngs=nnx.Rngs(0)), "sequence")

  Called inside `jax.shard_map`, `x` and `segment_ids` are then one device's part of the steps;
  `state`, passed in and returned, is that of the whole sequence, the same on all devices.

  Raises:
    NotImplementedError: the layer looks at other steps in a way that is not divided.
  """
  if not isinstance(layer, Divisible):
    raise NotImplementedError(
      f"{type(layer).__name__} cannot run on a sequence that is divided over devices "
      f"(sequence_axis={axis_name!r}); take another layer (docs/sequence_parallelism.md has the "
      "list), or leave the time axis whole with sequence_axis=None."
    )
  for _, module in nnx.iter_modules(layer):
    if isinstance(module, Divisible):
      module.sequence_axis = axis_name
  return layer
