"""The base class of all mixers: the checked call, the state, time sharded over devices."""

from typing import Any, ClassVar

import jax
from flax import nnx

from lnssm_jax.mixers.common.checks import check_positive, check_state
from lnssm_jax.mixers.common.routing import Aux
from lnssm_jax.ops.core.checks import check_floating, check_shape
from lnssm_jax.ops.core.explicit_axes import REPLICATED, under_auto_axes
from lnssm_jax.ops.core.segments import segments_of


class Mixer[State](nnx.Module):
  """A layer [B, T, D] -> [B, T, D] that carries a state of fixed size along the sequence.

      y, state = mixer(x, state=None, segment_ids=None)

  A subclass is constructed as `Class(dim, *, <options>, dtype, param_dtype, rngs)`, sets `dim` and
  writes `_mix` and `_init_state`; one with an auxiliary loss also `_mix_with_aux`. Its parameters
  are of `param_dtype`, its matrix products and its output of `dtype`; states, decays, norms and
  sums are float32 (float64 for float64 inputs). It holds `nnx.Param`s only: the state is a value,
  passed in and returned.

  Attributes:
    dim: D, the width of input and output.
    sequence_axis: the mesh axis over which a surrounding `jax.shard_map` shards time, or None;
      `shard_time` sets it.
    can_shard_time: whether the mixer can run on a sharded sequence.
    starts_as_model: whether a model that starts its matrices in its own way (`LanguageModel`,
      initialization="gpt2") starts those of the mixer too, as published models with it do.
    set_by_model: those of the constructor's arguments num_heads, layer and num_layers that a model
      passes on.
  """

  dim: int
  sequence_axis: str | None = None
  can_shard_time: ClassVar[bool] = True
  starts_as_model: ClassVar[bool] = False
  set_by_model: ClassVar[tuple[str, ...]] = ()

  @under_auto_axes(argument=1)
  def __call__(
    self, x: jax.Array, state: State | None = None, segment_ids: jax.Array | None = None
  ) -> tuple[jax.Array, State]:
    """Mixes the tokens of each sequence; causal.

    Splitting a sequence anywhere and carrying the state gives the same result as one call; with
    T = 1 the call decodes. Packing documents with `segment_ids` gives the same as running them
    apart.

    Args:
      x: [B, T, D] floating point, T >= 1.
      state: what an earlier call returned, or None at the start of a sequence. It belongs to the
        first segment.
      segment_ids: [B, T] integer; the state is reset wherever the id changes.

    Returns:
      (y [B, T, D] in the mixer's `dtype`, the state after the last token).

    Raises:
      ValueError: a shape or dtype is wrong, or a sequence is known to exceed the mixer's
        `max_length`; the message names the mixer and the argument.
    """
    self._check(x, state, segment_ids)
    return self._mix(x, state, segment_ids)

  @under_auto_axes(argument=1, results=(0, 0, REPLICATED))
  def with_aux(
    self, x: jax.Array, state: State | None = None, segment_ids: jax.Array | None = None
  ) -> tuple[jax.Array, State, Aux | None]:
    """The same call, for training: (y, the state, the auxiliary output).

    The auxiliary output is None for mixers without one. Its loss is a mean over all tokens of the
    call. `LanguageModel.with_aux` collects that of all layers.
    """
    self._check(x, state, segment_ids)
    return self._mix_with_aux(x, state, segment_ids)

  def _check(self, x, state, segment_ids) -> None:
    name = type(self).__name__
    check_shape(name, "x", x, (None, None, self.dim), "[B, T, D]")
    check_floating(name, "x", x)
    if 0 in x.shape:
      raise ValueError(f"{name}: x has shape {x.shape}; it must hold at least one token.")
    B, T, _ = x.shape
    segments_of(name, segment_ids, B, T)
    if state is not None:
      check_state(name, state, jax.eval_shape(lambda: self._init_state(B)), "[B, ...]")

  def init_state(self, batch_size: int) -> State:
    """Returns the state before the first token of `batch_size` sequences."""
    return self._init_state(check_positive("batch_size", batch_size))

  def _mix(
    self, x: jax.Array, state: State | None, segment_ids: jax.Array | None
  ) -> tuple[jax.Array, State]:
    """`__call__` on checked arguments."""
    raise NotImplementedError

  def _mix_with_aux(
    self, x: jax.Array, state: State | None, segment_ids: jax.Array | None
  ) -> tuple[jax.Array, State, Aux | None]:
    """`with_aux` on checked arguments."""
    return *self._mix(x, state, segment_ids), None

  def _init_state(self, B: int) -> State:
    """`init_state` for a checked batch size."""
    raise NotImplementedError


def shard_time(mixer: Any, axis_name: str) -> Any:
  """Sets the mesh axis that shards time, for a mixer and all layers in it; returns the mixer.

      mixer = shard_time(LNSSM(512, num_heads=4, rngs=nnx.Rngs(0)), "sequence")

  Called inside `jax.shard_map`, `x` and `segment_ids` are then one device's shard of the sequence;
  `state`, passed in and returned, is that of the whole sequence, the same on all devices.

  Raises:
    NotImplementedError: the mixer cannot run on a sharded sequence (`can_shard_time`).
  """
  if not getattr(mixer, "can_shard_time", False):
    raise NotImplementedError(
      f"{type(mixer).__name__} cannot run on a sequence that is sharded over devices "
      f"(sequence_axis={axis_name!r}); use another mixer (docs/sequence_parallelism.md lists "
      "them), or keep the sequence whole with sequence_axis=None."
    )
  layers: Any = nnx.iter_modules(mixer)
  for _, layer in layers:
    if hasattr(layer, "sequence_axis"):
      layer.sequence_axis = axis_name
  return mixer
