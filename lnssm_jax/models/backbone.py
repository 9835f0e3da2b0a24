"""A stack of blocks for continuous inputs: a model without a vocabulary."""

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.common.checks import check_positive, check_rngs, check_state
from lnssm_jax.mixers.common.lengths import checked_lengths, run_rows, without_padding
from lnssm_jax.models import layers
from lnssm_jax.models.block import NORMS, Block
from lnssm_jax.models.config import BackboneConfig
from lnssm_jax.models.dropout import ModelDropout
from lnssm_jax.models.layers import REMAT_POLICIES, LayerAux, LayerStates
from lnssm_jax.models.options import configured, options_by_mixer, pattern_of
from lnssm_jax.ops.core.checks import check_floating, check_shape
from lnssm_jax.ops.core.dropout import dropout, token_keys
from lnssm_jax.ops.core.explicit_axes import REPLICATED, under_auto_axes
from lnssm_jax.ops.core.segments import segments_of
from pallas_kernels.core import device


class Backbone(nnx.Module):
  """Features [B, T, D] -> [B, T, D] in `dtype`: num_layers blocks, then a norm.

      backbone = models.Backbone(dim=64, num_layers=4, mixer="gla", num_heads=4, rngs=nnx.Rngs(0))
      y, state = backbone(x)  # causal: y[:, t] depends on x[:, :t + 1]

  The layers are those of a `LanguageModel`, and start as their classes say. Projections of the
  inputs to D channels, and heads, are yours. With direction="both" every token sees the whole
  sequence, and the state is None.

  Args:
    config: the settings; or they are given as keyword arguments, Backbone(dim=8, ...).

  Raises:
    ValueError: as `BackboneConfig`; or a mixer whose layers share a table, such as HGRN with shared
      lower bounds, in both directions.
  """

  @configured(BackboneConfig)
  def __init__(self, config: BackboneConfig, *, rngs: nnx.Rngs) -> None:
    check_rngs("Backbone", rngs)
    self.config, self.dim, self.dtype = config, config.dim, jnp.dtype(config.dtype)
    self.direction, self.num_layers = config.direction, config.num_layers
    self.remat, self.unroll, self.drop_path = config.remat, config.unroll, config.drop_path
    self.embedding_dropout = config.embedding_dropout
    pattern = pattern_of(config.mixer)
    options = options_by_mixer(pattern, config.mixer_options, config.dim, config.num_heads)

    def block(mixer, key, layer):
      given = {"mixer_options": options[mixer], "layer": layer, "rngs": nnx.Rngs(key)}
      return Block(config, mixer=mixer, **given)

    self.blocks = layers.make_blocks(block, pattern, config.num_layers, rngs.params())
    if self.direction == "both":
      layers.check_both_ways(self.blocks)
    of_norm = {"eps": config.norm_eps, "param_dtype": jnp.dtype(config.param_dtype)}
    self.norm = NORMS[config.norm](config.dim, **of_norm, rngs=rngs)

  @property
  def max_length(self) -> int | None:
    """The longest sequence, where a mixer keeps a cache of bounded length; None: any length."""
    return layers.max_length(self.blocks)

  def layer(self, number: int) -> Block:
    """The block of one layer, counted from 0, copied out of the stacks."""
    return layers.one(layers.tied(self.blocks), number)

  def init_state(self, batch_size: int) -> LayerStates | None:
    """The state before the first token, as of `LanguageModel`; None in both directions."""
    check_positive("batch_size", batch_size)
    if self.direction == "both":
      return None
    return layers.init_state(self.blocks, batch_size)

  @under_auto_axes(argument=1, results=(0, 1))
  def __call__(
    self,
    x: jax.Array,
    state: LayerStates | None = None,
    segment_ids: jax.Array | None = None,
    *,
    lengths: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
  ) -> tuple[jax.Array, LayerStates | None]:
    """Returns (y [B, T, D], the state after the last token, None in both directions).

    Args:
      x: [B, T, D] floating point.
      state: what an earlier call returned, or None at the start of a sequence.
      segment_ids: [B, T] integer; where it changes, another sequence begins.
      lengths: [B] integer, 0 to T, of rows padded on the right; y is 0 at padding, which may hold
        anything.
      dropout_key: a key, or one for each row [B], for training; None drops nothing.

    Raises:
      ValueError: a shape or dtype is wrong, or there is a state in both directions.
    """
    self._check(x, state)
    if lengths is None:
      return self._run(x, state, segment_ids, dropout_key)[:2]
    ends = checked_lengths("Backbone", lengths, x, dropout_key, None)
    if self.direction == "both":  # padding is a sequence of its own
      B, T, _ = x.shape
      segments_of("Backbone", segment_ids, B, T)
      ids = jnp.zeros((B, T), jnp.int32) if segment_ids is None else jnp.asarray(segment_ids)
      ids = jnp.where(jnp.arange(T) < ends[:, None], ids, ids.max() + 1)
      y, _, _ = self._run(without_padding(x, ends), None, ids, None)
      return without_padding(y, ends), None
    run = lambda x, state, ids: self._run(x, state, ids, None)[:2]
    arguments = x, state, segment_ids, ends, self.init_state(len(x))
    return run_rows("Backbone", run, *arguments, batch_axis=1, max_length=self.max_length)

  @under_auto_axes(argument=1, results=(0, 1, REPLICATED))
  def with_aux(
    self,
    x: jax.Array,
    state: LayerStates | None = None,
    segment_ids: jax.Array | None = None,
    *,
    dropout_key: jax.Array | None = None,
  ) -> tuple[jax.Array, LayerStates | None, LayerAux]:
    """The same call for training: (y, the state, the auxiliary outputs of causal mixers)."""
    self._check(x, state)
    return self._run(x, state, segment_ids, dropout_key, with_aux=self.direction == "causal")

  def _check(self, x, state) -> None:
    check_shape("Backbone", "x", x, (None, None, self.dim), "[B, T, D]")
    check_floating("Backbone", "x", x)
    if state is None:
      return
    if self.direction == "both":
      raise ValueError(
        "Backbone: state is given, but with direction='both' a token depends on later ones; leave"
        " it out and give whole sequences."
      )
    check_state("Backbone", state, jax.eval_shape(lambda: self.init_state(len(x))), "[L, B, ...]")

  def _run(self, x, state, segment_ids, dropout_key, *, with_aux: bool = False):
    # As in a `LanguageModel`: without a loop the compiler could undo a rematerialization.
    whole = self.remat == "none" and device.default_device().platform == "gpu"
    B, T, _ = x.shape
    x = x.astype(self.dtype)
    drops = ModelDropout.of("Backbone", dropout_key, B, self.num_layers, self.drop_path)
    if drops is not None:
      x = dropout(x, token_keys(drops.embedding, T), self.embedding_dropout)
    x, state, aux = layers.run(
      layers.tied(self.blocks),
      x,
      state,
      segment_ids,
      dropout=None if drops is None else drops.layers,
      policy=REMAT_POLICIES[self.remat],
      unroll=self.unroll or (self.num_layers if whole else 1),
      with_aux=with_aux,
      with_state=self.direction == "causal",
    )
    return self.norm(x, dtype=self.dtype), None if self.direction == "both" else state, aux
