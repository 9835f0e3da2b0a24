"""The base class of all mixers: the checked call, the state, time sharded over devices."""

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.export import is_symbolic_dim

from lnssm_jax.mixers.common.checks import (
  check_options,
  check_positive,
  check_state,
)
from lnssm_jax.mixers.common.lengths import checked_lengths, run_rows, run_units
from lnssm_jax.mixers.common.recompute import recomputed
from lnssm_jax.mixers.common.routing import Aux, RowSparsity
from lnssm_jax.ops import recording
from lnssm_jax.ops.core import dispatch
from lnssm_jax.ops.core.checks import check_floating, check_shape
from lnssm_jax.ops.core.explicit_axes import REPLICATED, under_auto_axes
from lnssm_jax.ops.core.segments import segments_of
from lnssm_jax.ops.core.symbolic import naming_length

# Of the last axes of a parameter: the mesh axes over which each is sharded.
Layout = tuple[str | tuple[str, ...] | None, ...]


class Mixer[State](nnx.Module):
  """A layer [B, T, D] -> [B, T, D] that carries a state of fixed size along the sequence.

      y, state = mixer(x, state=None, segment_ids=None)

  A subclass is constructed as `Class(dim, *, <options>, dtype, param_dtype, rngs)`, sets `dim` and
  writes `_mix` and `_init_state`; one with an auxiliary loss also `_mix_with_aux`, or as a
  `SelectingMixer` one method for both. Its parameters are of `param_dtype`, its matrix products and
  its output of `dtype`; states, decays, norms and sums are float32 (float64 for float64 inputs). It
  holds `nnx.Param`s only: the state is a value, passed in and returned.

  Attributes:
    name: of the class in `MIXERS`.
    dim: D, the width of input and output.
    sequence_axis: the mesh axis over which a surrounding `jax.shard_map` shards time, or None;
      `shard_time` sets it.
    can_shard_time: whether the mixer can run on a sharded sequence.
    needs_length: whether the computation needs to know T; where T is a symbol of `jax.export`, it
      runs on pieces of the sequence, one after the other.
    starts_as_model: whether a model that starts its matrices in its own way (`LanguageModel`,
      initialization="gpt2") starts those of the mixer too, as published models with it do.
    output_starts_smaller: whether it then starts `o_proj` by the number of layers, as the last
      matrix of a branch of the residual stream.
    attention_dropout: the rate at which attention probabilities are dropped in a call with a
      `dropout_key`; an option of mixers that have such probabilities.
    tied: the name of a parameter of which the layers of a model make a table, or None; `tie` turns
      the table [L, ...] into the values that the layers use.
    sharding: rules for parameters whose names `lnssm_jax.sharding.RULES` does not know, as those:
      (a regular expression of the path below the mixer, the layout of the last axes).
    without_weight_decay: regular expressions of such paths, of matrices that do not decay.
    no_recurrence: why the layer is no recurrence in the form of `lnssm_jax.frameworks`, where more
      can be said than its op says: it follows "its <op> "; or None.
    recomputes: whether the backward pass of `with_aux`, by which models train, computes again what
      costs little (`mixers.common.recompute`): where most of what it needs is elementwise.
    set_by_model: those of the constructor's arguments num_heads, layer and num_layers that a model
      passes on.
  """

  name: ClassVar[str]
  dim: int
  sequence_axis: str | None = None
  attention_dropout: float = 0.0
  tied: str | None = None
  can_shard_time: ClassVar[bool] = True
  needs_length: ClassVar[bool] = False
  starts_as_model: ClassVar[bool] = False
  output_starts_smaller: ClassVar[bool] = True
  sharding: ClassVar[tuple[tuple[str, Layout], ...]] = ()
  without_weight_decay: ClassVar[tuple[str, ...]] = ()
  no_recurrence: ClassVar[str | None] = None
  recomputes: ClassVar[bool] = False
  set_by_model: ClassVar[tuple[str, ...]] = ()

  def __new__(cls, *args: Any, **options: Any):
    check_options(cls, options)
    return super().__new__(cls)

  @under_auto_axes(argument=1)
  def __call__(
    self,
    x: jax.Array,
    state: State | None = None,
    segment_ids: jax.Array | None = None,
    *,
    lengths: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
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
      lengths: [B] integer, 0 to T, for rows that are padded on the right: how many tokens of each
        are real. The state is then that after each row's own last token, and y is 0 at padding,
        which may hold anything. Given both `state` and `lengths`, the work is up to twice that of a
        call. Under `jit`, lengths outside are clipped.
      dropout_key: a key (`jax.random.key(0)`), or one for each row [B]: training, with dropout.
        None drops nothing. Not with `lengths`.

    Returns:
      (y [B, T, D] in the mixer's `dtype`, the state after the last token).

    Raises:
      ValueError: a shape or dtype is wrong, a length is outside, or a sequence is known to exceed
        the mixer's `max_length`; the message names the mixer and the argument.
      NotImplementedError: `lengths` are given of a sequence that is sharded over devices.
    """
    self._check(x, state, segment_ids)
    name, axis = type(self).__name__, self.sequence_axis
    with naming_length(name, x):
      if lengths is None:
        return self._mix_dropping(x, state, segment_ids, dropout_key)
      ends = checked_lengths(name, lengths, x, dropout_key, axis)
      arguments = x, state, segment_ids, ends, self._init_state(x.shape[0])
      run = functools.partial(self._mix_dropping, dropout_key=None)
      return run_rows(name, run, *arguments, max_length=getattr(self, "max_length", None))

  @under_auto_axes(argument=1, results=(0, 0, REPLICATED))
  def with_aux(
    self,
    x: jax.Array,
    state: State | None = None,
    segment_ids: jax.Array | None = None,
    *,
    dropout_key: jax.Array | None = None,
  ) -> tuple[jax.Array, State, Aux | None]:
    """The same call, for training: (y, the state, the auxiliary output).

    The auxiliary output is None for mixers without one. Its loss is a mean over all tokens of the
    call. `LanguageModel.with_aux` collects that of all layers.
    """
    self._check(x, state, segment_ids)
    if dropout_key is not None and self.attention_dropout:
      return self._mix_dropping_with_aux(x, state, segment_ids, dropout_key)
    mix = recomputed(self._mix_with_aux) if self.recomputes else self._mix_with_aux
    return mix(x, state, segment_ids)

  def _check(self, x, state, segment_ids) -> None:
    name = type(self).__name__
    if not hasattr(x, "shape"):
      raise ValueError(f"{name}: x is a {type(x).__name__}; give an array, jnp.asarray(x).")
    if jnp.ndim(x) == 2:
      raise ValueError(
        f"{name}: x has shape {x.shape}, but [B, T, D] is needed; mixers.single(mixer, x) reads one"
        " sequence [T, D], mixers.step(mixer, x, state) one token of each sequence [B, D]."
      )
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

  def recurrence_flops(self, state: Any, length: int) -> float:
    """FLOPs per token of the recurrence, without the products of kernels: 2 per multiply-add.

    A class states them by a formula of `lnssm_jax.mixers.common.flops`, or by a method.

    Args:
      state: the shapes of `init_state(1)`.
      length: of the sequence, on which only attention and long convolutions depend.

    Raises:
      NotImplementedError: the class does not state them.
    """
    raise NotImplementedError(
      f"{type(self).__name__} does not state the FLOPs of its recurrence; set recurrence_flops in "
      "its class, such as recurrence_flops = flops.linear_attention of lnssm_jax.mixers.common."
    )

  def decay(
    self,
    x: jax.Array | None = None,
    state: State | None = None,
    segment_ids: jax.Array | None = None,
  ) -> jax.Array:
    """The logarithms of the decays, <= 0: of each token of x, or constants of the layer.

        half_life = math.log(0.5) / mixer.decay()          # in tokens, of a layer with constants

    They are what the layer's recurrence is given. K counts the rows of a head's state, or is 1 if
    they decay alike; where its columns decay too, a last axis V follows. Query heads that share a
    decay count once. A layer without heads has H = 1, one with N numbers per channel (Mamba,
    Longhorn, S4) its channels as H and N as K. A document boundary is no decay.

    `SSE` and `MoM` have the rows of several states side by side, K times their number: first those
    of the state that all tokens use, then those of each partition, 0 where a token does not select
    it. `S4` has the moduli of its matrix's eigenvalues.

    Args:
      x, state, segment_ids: as for the call. x=None is for constant decays; an x is not needed
        there, and changes nothing.

    Returns:
      [H, K] if they are constant, else [B, T, H, K]; float32, or float64 for float64 inputs.

    Raises:
      NotImplementedError: the mixer has no decay, such as softmax attention and DeltaNet.
      ValueError: `x` is None, but the decays depend on it; or as the call.
    """
    name, token = type(self).__name__, jnp.zeros((1, 1, self.dim), jnp.float32)
    given = token if x is None else x
    self._check(given, state, segment_ids)
    decays = self._log_decays(given, state, segment_ids)
    if not decays:
      raise NotImplementedError(
        f"{name}.decay: a {name} with these options has no decay: its state forgets nothing, or "
        "only by being overwritten. `lnssm_jax.analysis.state_norms` shows how its state grows."
      )
    if x is None and any(decay.ndim >= 4 for decay in decays):
      raise ValueError(f"{name}.decay: x=None, but its decays depend on x; give x [B, T, D].")
    return decays[0] if len(decays) == 1 else jnp.concatenate(decays, axis=-1)

  def _log_decays(
    self, x: jax.Array, state: State | None, segment_ids: jax.Array | None
  ) -> list[jax.Array]:
    """Log decays [H, K] or [B, T, H, K] of each recurrence in the layer; none: an empty list."""
    with recording() as calls:
      self._mix(x, state, segment_ids)
    if not calls:
      raise NotImplementedError(
        f"{type(self).__name__}.decay: the layer calls no op of lnssm_jax.ops, so its decay is not "
        "known; write _log_decays in its class."
      )
    facts = [(dispatch.fact(call.op, "log_decay"), call.arguments) for call in calls]
    decays = [log_decay(arguments) for log_decay, arguments in facts if log_decay is not None]
    return [decay for decay in decays if decay is not None]

  def _mix(
    self, x: jax.Array, state: State | None, segment_ids: jax.Array | None
  ) -> tuple[jax.Array, State]:
    """`__call__` on checked arguments."""
    raise NotImplementedError

  def _mix_dropping(
    self,
    x: jax.Array,
    state: State | None,
    segment_ids: jax.Array | None,
    dropout_key: jax.Array | None,
  ) -> tuple[jax.Array, State]:
    """`_mix`, of a mixer with `attention_dropout` under a key that is not None with dropout."""
    del dropout_key
    if self.needs_length and self.sequence_axis is None and is_symbolic_dim(x.shape[1]):
      return run_units(self._mix, x, state, segment_ids, self._init_state(x.shape[0]))
    return self._mix(x, state, segment_ids)

  def _mix_with_aux(
    self, x: jax.Array, state: State | None, segment_ids: jax.Array | None
  ) -> tuple[jax.Array, State, Aux | None]:
    """`with_aux` on checked arguments."""
    return *self._mix_dropping(x, state, segment_ids, None), None

  def _mix_dropping_with_aux(
    self,
    x: jax.Array,
    state: State | None,
    segment_ids: jax.Array | None,
    dropout_key: jax.Array,
  ) -> tuple[jax.Array, State, Aux | None]:
    """`_mix_with_aux` with dropout: of a mixer that has both, such as one made of others."""
    return *self._mix_dropping(x, state, segment_ids, dropout_key), None

  def _place(self, state: Any, segment_ids: jax.Array | None) -> dict[str, Any]:
    """The arguments by which an op continues `state`, its own, on this shard of the sequence."""
    axis = self.sequence_axis
    return {"axis_name": axis, "initial_state": state, "segment_ids": segment_ids}

  def _init_state(self, B: int) -> State:
    """`init_state` for a checked batch size."""
    raise NotImplementedError


class SelectingMixer[State](Mixer[State]):
  """A mixer whose tokens select parts of the state: one run gives its output and its selection.

  A subclass writes `_run` instead of `_mix`, and `_aux` unless its `rows` are what is selected.
  """

  rows: RowSparsity | None

  def _run(
    self, x: jax.Array, state: State | None, segment_ids: jax.Array | None
  ) -> tuple[jax.Array, State, tuple[jax.Array, jax.Array] | None]:
    """(out, state, the selection: what `_aux` takes, or None if nothing is selected)."""
    raise NotImplementedError

  def _aux(self, weights: jax.Array, selected: jax.Array) -> Aux:
    """The auxiliary output of a selection."""
    assert self.rows is not None
    return self.rows.aux(weights, selected)

  def _mix(self, x, state, segment_ids):
    return self._run(x, state, segment_ids)[:2]

  def _mix_with_aux(self, x, state, segment_ids):
    out, state, selection = self._run(x, state, segment_ids)
    return out, state, None if selection is None else self._aux(*selection)


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
