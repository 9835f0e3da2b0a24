"""A language model: embedding, a stack of blocks run by one scan, and a head."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.common.capacity import check_capacity, nan_beyond
from lnssm_jax.mixers.common.checks import check_positive, check_rngs, check_state
from lnssm_jax.mixers.common.lengths import checked_lengths, run_rows
from lnssm_jax.models import layers
from lnssm_jax.models.block import NORMS, Block
from lnssm_jax.models.config import ModelConfig
from lnssm_jax.models.dropout import ModelDropout
from lnssm_jax.models.embedding import Head, check_ids, check_tokens, lookup
from lnssm_jax.models.initialization import GPT2_STD, INITIALIZATIONS
from lnssm_jax.models.layers import REMAT_POLICIES, LayerAux, LayerStates, PositionedStates
from lnssm_jax.models.options import configured, options_by_mixer, pattern_of, table_of
from lnssm_jax.models.shared import AFTER_SHARED, numbers_of_blocks, shared_blocks
from lnssm_jax.ops.core.dropout import dropout, token_keys
from lnssm_jax.ops.core.explicit_axes import REPLICATED, under_auto_axes
from lnssm_jax.ops.core.halo import step_positions
from pallas_kernels.core import device


class LanguageModel(nnx.Module):
  """Tokens [B, T] -> logits [B, T, vocab] float32 of the token that follows each.

      embedding -> norm -> num_layers blocks -> norm -> head

  The blocks' parameters are stacked on a leading axis L. Parameters are of `param_dtype`; matrix
  products and the residual stream are of `dtype`; norms, decays, states and logits are float32.

  Args:
    config: the settings; or they are given as keyword arguments, LanguageModel(dim=8, ...).
    sequence_axis: the mesh axis over which a surrounding `jax.shard_map` shards the time axis of
      tokens, segments and logits, or None. The states, passed in and returned, are then those of
      the whole sequence, the same on all devices.

  Raises:
    NotImplementedError: `sequence_axis` is given and a mixer cannot run on a sharded sequence.
    ValueError: as `ModelConfig`.

  Sources: LNSSM, section 5, and its published code: the norm after the embedding, and "lnssm";
  "gpt2": GPT-2 (Radford et al. 2019), section 2.3, which the published codes of GLA, Mamba,
  Longhorn and others follow. Dropout: Srivastava et al. 2014; drop path: stochastic depth (Huang et
  al. 2016), section 3.
  """

  @configured(ModelConfig)
  def __init__(
    self, config: ModelConfig, *, sequence_axis: str | None = None, rngs: nnx.Rngs
  ) -> None:
    check_rngs("LanguageModel", rngs)
    vocab_size, dim = self.vocab_size, self.dim = config.vocab_size, config.dim
    self.num_layers, self.remat, self.unroll = config.num_layers, config.remat, config.unroll
    self.dtype, param_dtype = jnp.dtype(config.dtype), jnp.dtype(config.param_dtype)
    self.embedding_scale, self.logit_soft_cap = config.embedding_scale, config.logit_soft_cap
    self.logit_scale = config.logit_scale
    self.embedding_dropout, self.drop_path = config.embedding_dropout, config.drop_path
    self.sequence_axis = sequence_axis
    pattern = pattern_of(config.mixer)
    # Of one class, so that equal models have equal graphs. A pattern of one is that mixer.
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(ModelConfig)}
    values["mixer"] = config.mixer if len(pattern) > 1 else pattern[0]
    self.config = ModelConfig(**values)
    options = options_by_mixer(pattern, config.mixer_options, dim, config.num_heads)
    usual = "lnssm" if config.embedding_norm and not config.tie_embeddings else "gpt2"
    start = INITIALIZATIONS[config.initialization or usual](vocab_size, dim)
    of_norm = {"eps": config.norm_eps, "param_dtype": param_dtype, "rngs": rngs}
    new_norm = lambda: NORMS[config.norm](dim, **of_norm)
    self.embedding = nnx.Param(start.embedding(rngs.params(), (vocab_size, dim), param_dtype))
    self.embedding_norm = new_norm() if config.embedding_norm else None
    if config.learned_positions is None:
      self.positions = None
    else:
      normal = nnx.initializers.normal(GPT2_STD)
      self.positions = nnx.Param(
        normal(rngs.params(), (config.learned_positions, dim), param_dtype)
      )

    own = options.get(AFTER_SHARED)
    blocks = 1 if own is None else own.get("num_blocks", 1)
    numbers = numbers_of_blocks(pattern, config.num_layers, blocks)

    def block(place, key, layer):
      row, number, alike = place
      return Block(
        config,
        mixer=row.mixer,
        mixer_options=options[row.mixer],
        channel_mixer=row.channel_mixer,
        norm_place=row.norm_place,
        shared=number,
        alike=alike,
        layer=layer,
        matrix_std=start.matrix_std,
        sequence_axis=sequence_axis,
        rngs=nnx.Rngs(key),
      )

    alike = [range(place, config.num_layers, len(pattern)) for place in range(len(pattern))]
    places = list(zip(table_of(config), numbers, alike, strict=True))
    self.blocks = layers.make_blocks(block, places, config.num_layers, rngs.params())
    self.shared = None if own is None else shared_blocks(config, own, sequence_axis, rngs)
    self.norm = new_norm()
    if config.tie_embeddings:
      self.head = None
    else:
      dtypes = {"param_dtype": param_dtype}
      self.head = Head(dim, vocab_size, kernel_init=start.head, **dtypes, rngs=rngs)

  @property
  def max_length(self) -> int | None:
    """The longest sequence, where a mixer keeps a cache of bounded length; None: any length."""
    lengths = [layers.max_length(self.blocks)]
    lengths += [] if self.positions is None else [self.positions.shape[0]]
    return min((length for length in lengths if length is not None), default=None)

  def layer(self, number: int) -> Block:
    """The block of one layer, counted from 0; its mixer is `model.layer(2).mixer`.

    Its parameters are copied out of the stacks: changing them does not change the model.

    Raises:
      ValueError: there is no such layer.
    """
    return layers.one(layers.tied(self.blocks), number)

  @property
  def has_dropout(self) -> bool:
    """Whether a call with a `dropout_key` differs from one without."""
    return bool(self.embedding_dropout or self.drop_path) or layers.have_dropout(self.blocks)

  def init_state(self, batch_size: int) -> LayerStates:
    """The state before the first token: a `BlockState` with a leading axis L. float32.

    Of a pattern of mixers, a list with the state of each place, whose axis counts its layers. With
    learned positions `PositionedStates`.
    """
    state = layers.init_state(self.blocks, check_positive("batch_size", batch_size))
    if self.positions is None:
      return state
    return PositionedStates(state, jnp.zeros((1, batch_size), jnp.int32))

  @under_auto_axes(argument=1, results=(0, 1))
  def hidden(
    self,
    tokens: jax.Array,
    state: LayerStates | None = None,
    segment_ids: jax.Array | None = None,
    *,
    lengths: jax.Array | None = None,
    gather: Callable[[Block], Block] | None = None,
    dropout_key: jax.Array | None = None,
  ) -> tuple[jax.Array, LayerStates]:
    """Returns (the input of the head [B, T, D] in `dtype`, the state after the last token).

    An id outside [0, vocab_size) raises where it is known, outside of `jit`; else it gives NaN.

    Args:
      tokens: [B, T] integer; or, in their place, [B, T, D] floating point: embeddings of your own
        instead of the table's rows (the `inputs_embeds` of other libraries).
      state: what an earlier call returned, or None at the start of a sequence.
      segment_ids: [B, T] integer; the state is reset wherever the id changes.
      lengths: [B] integer, 0 to T, for rows that are padded on the right, as for `Mixer`: the state
        is that after each row's own last token; at padding the results, and logits, are 0.
      gather: gathers a layer just before it runs, if the layers' parameters are sharded over
        devices, such as `lnssm_jax.sharding.gather`.
      dropout_key: a key (`jax.random.key(0)`), or one for each row [B], for training; another in
        each step. None drops nothing. A row's masks depend on its key and its number of tokens
        before, and not on `jit`, `remat`, `unroll` or a mesh.

    Raises:
      ValueError: a rank, dtype, shape or known token id is wrong; the message names it.
    """
    run = lambda x, state, ids: self._hidden(x, state, ids, gather, dropout_key)[:2]
    if lengths is None:
      return run(tokens, state, segment_ids)
    self._check(tokens, state)
    name, axis = "LanguageModel", self.sequence_axis
    ends = checked_lengths(name, lengths, tokens, dropout_key, axis)
    arguments = tokens, state, segment_ids, ends, self.init_state(tokens.shape[0])
    return run_rows(name, run, *arguments, batch_axis=1, max_length=self.max_length)

  @under_auto_axes(argument=1, results=(1, 1))
  def hidden_states(
    self,
    tokens: jax.Array,
    state: LayerStates | None = None,
    segment_ids: jax.Array | None = None,
  ) -> tuple[jax.Array, LayerStates]:
    """Returns (the residual stream around all layers [L + 1, B, T, D], the state).

    Entry 0 is the input of the first layer, entry l the sum after l layers; `model.norm` of the
    last is the input of the head. Arguments and errors are those of `hidden`.
    """
    return self._hidden(tokens, state, segment_ids, with_streams=True)[:2]

  @under_auto_axes(argument=1, results=(0, REPLICATED))
  def hidden_and_aux(
    self,
    tokens: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    gather: Callable[[Block], Block] | None = None,
    dropout_key: jax.Array | None = None,
  ) -> tuple[jax.Array, LayerAux]:
    """Returns (the input of the head, the auxiliary outputs of the mixers), for training.

    No state is given or returned: in the backward pass it would cost its gradient, though 0. The
    auxiliary outputs are an `Aux` with a leading axis L, None for a mixer without, and for a
    pattern of mixers a list with that of each place. `models.aux_loss` is what a loss adds.
    """
    options = {"with_aux": True, "with_state": False}
    hidden, _, aux = self._hidden(tokens, None, segment_ids, gather, dropout_key, **options)
    return hidden, aux

  def _hidden(self, tokens, state, segment_ids, gather=None, dropout_key=None, **results):
    self._check(tokens, state)
    # Without a loop the compiler could undo a rematerialization, finding the results still there.
    whole = self.remat == "none" and device.default_device().platform == "gpu"
    unroll = self.unroll or (self.num_layers if whole else 1)
    options = {"policy": REMAT_POLICIES[self.remat], "unroll": unroll, "gather": gather}
    options["shared"] = self.shared
    positions, last = None, None
    if self.positions is not None:
      state, positions, last = self._count(tokens, state, segment_ids)
    (B, T), axis = jnp.shape(tokens)[:2], self.sequence_axis
    key = dropout_key if self.has_dropout else None
    drops = ModelDropout.of("LanguageModel", key, B, self.num_layers, self.drop_path)
    x = self.embed(tokens, positions)
    if drops is not None:
      x = dropout(x, token_keys(drops.embedding, T, axis), self.embedding_dropout)
      results["dropout"] = drops.layers
    x, state, aux = layers.run(
      layers.tied(self.blocks), x, state, segment_ids, **options, **results
    )
    hidden = x if results.get("with_streams") else self.norm(x, dtype=self.dtype)
    if self.positions is None or positions is None or last is None:
      return hidden, state, aux
    if state is not None:
      state = PositionedStates(state, last)
    marked = lambda x: nan_beyond(x, positions, len(self.positions[...]))
    return (jax.vmap(marked) if hidden.ndim == 4 else marked)(hidden), state, aux

  def _count(self, tokens, state, segment_ids):
    """The layers' states, the position of each token [B, T], and the tokens so far [1, B]."""
    (B, T), axis, limit = jnp.shape(tokens)[:2], self.sequence_axis, len(self.positions[...])
    state, before = (None, None) if state is None else (state.layers, state.position[0])
    check_capacity("LanguageModel", T, before, segment_ids, limit, axis)
    positions, last = step_positions(B, T, segment_ids, before, axis_name=axis)
    return state, positions, last[None]

  @under_auto_axes(argument=1)
  def embed(self, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
    """The input of the first layer, [B, T, D] in `dtype`; `positions` [B, T] of learned ones."""
    x = jnp.asarray(tokens)
    if x.ndim != 3:
      check_ids("LanguageModel", tokens, self.vocab_size)
      x = lookup(self.embedding[...], x)
    if self.embedding_scale is not None:
      x = x.astype(self.dtype) * self.embedding_scale
    if self.positions is not None:
      if positions is None:
        raise ValueError("LanguageModel: embed needs `positions`: the model has a table of them.")
      table = self.positions[...]
      x = x + lookup(table, jnp.minimum(positions, len(table) - 1))
    if self.embedding_norm is None:
      return x.astype(self.dtype)
    return self.embedding_norm(x, dtype=self.dtype)

  def head_kernel(self) -> jax.Array:
    """Returns W [D, vocab] of the logits h W before their soft cap, in `param_dtype`."""
    kernel = self._head()
    return kernel if self.logit_scale == 1 else (kernel * self.logit_scale).astype(kernel.dtype)

  def _head(self) -> jax.Array:
    return self.embedding[...].T if self.head is None else self.head.kernel[...]

  @under_auto_axes(argument=1)
  def logits(self, hidden: jax.Array) -> jax.Array:
    """[..., D] -> [..., vocab] float32; the product is in `dtype`, its sum in float32."""
    # The logits are scaled, not the kernel: a single token would need a copy of it.
    matrices = hidden.astype(self.dtype), self._head().astype(self.dtype)
    z = jnp.matmul(*matrices, preferred_element_type=jnp.float32)
    z = z if self.logit_scale == 1 else z * self.logit_scale
    cap = self.logit_soft_cap
    return z if cap is None else cap * jnp.tanh(z / cap)

  @under_auto_axes(argument=1, results=(0, 1))
  def __call__(
    self,
    tokens: jax.Array,
    state: LayerStates | None = None,
    segment_ids: jax.Array | None = None,
    *,
    lengths: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
  ) -> tuple[jax.Array, LayerStates]:
    """Returns (logits [B, T, vocab] float32, the state after the last token).

    Arguments and errors are those of `hidden`.
    """
    options = {"lengths": lengths, "dropout_key": dropout_key}
    hidden, state = self.hidden(tokens, state, segment_ids, **options)
    return self.logits(hidden), state

  @under_auto_axes(argument=1, results=(0, 1, REPLICATED))
  def with_aux(
    self,
    tokens: jax.Array,
    state: LayerStates | None = None,
    segment_ids: jax.Array | None = None,
    *,
    dropout_key: jax.Array | None = None,
  ) -> tuple[jax.Array, LayerStates, LayerAux]:
    """The same call for training: (logits, the state, the auxiliary outputs of the mixers)."""
    options = {"dropout_key": dropout_key, "with_aux": True}
    hidden, state, aux = self._hidden(tokens, state, segment_ids, **options)
    return self.logits(hidden), state, aux

  def _check(self, tokens, state):
    B = check_tokens("LanguageModel", tokens, self.dim)
    if state is not None:
      expected = jax.eval_shape(lambda: self.init_state(B))
      check_state("LanguageModel", state, expected, "[L, B, ...]")
