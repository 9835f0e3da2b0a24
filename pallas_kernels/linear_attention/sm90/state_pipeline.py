"""The recurrent state along the chunks of a sequence: the inter-chunk pipeline of linear attention.

    S_{n+1} = diag(decay_n) S_n + sum over the tokens j of chunk n of  a_j w_j b_j^T

A CTA has the columns of values of one `value_tile`, of one head, of one split of a sequence. Its
producer warpgroup loads what the columns share and runs the prologue of each chunk; each consumer
warpgroup loads the rest for its own 64 columns and carries their state [K, 64] in registers.

`run_state_pipeline` is used by the output kernels in `forward.py` and by `chunk_states`
here, which computes the states at all chunk boundaries alone: forward (a = keys, b = values), or in
reverse for the gradient of the state (a = queries, b = the cotangent of the output).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.boundaries import DocumentBoundaries, StateDocuments
from pallas_kernels.core.chunk_grid import (
  ChunkIndex,
  Tiles,
  TileSpec,
  state_value_block_tile,
)
from pallas_kernels.core.pipeline import Pipeline, PipelineBarriers, Prologue, launch_pipeline
from pallas_kernels.core.wgmma import (
  ROW_LAYOUT,
  TILE_WIDTH,
  WITHOUT_SCRATCH,
  Backend,
  Ref,
  broadcast_rows,
  fill_ones_column,
  iota,
  load_row_vector,
  load_scaled,
  load_tile,
  map_refs,
  smem_tile,
  store_unoptimized,
  transpose_ref,
  with_int32_indices,
  zero_accumulator,
)
from pallas_kernels.linear_attention.config import PipelineConfig
from pallas_kernels.linear_attention.sm90 import intra_chunk
from pallas_kernels.linear_attention.types import Inputs, Options


class DecayArrays(NamedTuple):
  """Arrays, or GMEM references, of a `ChunkDecay` or `ConstantDecay`."""

  total: Any = None
  log_decay: Any = None
  documents: DocumentBoundaries = DocumentBoundaries(None, None)


class ChunkDecay(NamedTuple):
  """Total decay of the state over each chunk, as an array. Queries and keys are decayed already."""

  total: Any  # [B|1, H, N|1, K] float32; or [B|1, H, N|1] for all K of a head
  width: int  # K

  @property
  def arrays(self) -> DecayArrays:
    """The arrays that the kernel reads from GMEM."""
    return DecayArrays(total=self.total)

  def of_chunk(self, gmem: DecayArrays) -> Callable[..., jax.Array]:
    """A function of the chunk: [K] float32, the decay of the state over it."""

    def total(at, states=None):
      del states  # is part of the array
      total = gmem.total
      batch = at.batch if total.shape[0] > 1 else 0
      n = at.chunk if total.shape[2] > 1 else 0
      if len(total.shape) == 4:
        return load_row_vector(total.at[batch, at.head, n])
      return plgpu.layout_cast(lax.broadcast(total[batch, at.head, n], (self.width,)), ROW_LAYOUT)

    return total


class ConstantDecay(NamedTuple):
  """Time-invariant decay per key channel: queries and keys are decayed in the prologue."""

  log_decay: jax.Array  # [H, K] float32
  documents: DocumentBoundaries
  read_first: bool  # whether queries see the state before the decay of their own token
  length: int  # tokens before padding
  chunk: int

  @property
  def arrays(self) -> DecayArrays:
    """The arrays that the kernel reads from GMEM."""
    return DecayArrays(log_decay=self.log_decay, documents=self.documents.reset_only)

  def of_chunk(self, gmem: DecayArrays) -> Callable[..., jax.Array]:
    """A function of the chunk, and of its `StateDocuments` if they are loaded: [K] float32, the
    decay of the state over it."""
    log_decay = load_row_vector(gmem.log_decay.at[lax.axis_index("head")])
    rate = jnp.maximum(log_decay, intra_chunk.SMALLEST_LOG_DECAY)

    def total(at, states=None):
      tokens = jnp.clip(self.length - at.chunk * self.chunk, 0, self.chunk).astype(jnp.float32)
      decay = jnp.exp(rate * tokens)
      states = gmem.documents.load_states(at) if states is None else states
      return decay if states is None else states.keeps_state(decay)

    return total

  def factors(
    self, which: intra_chunk.Exponent, at: ChunkIndex, gmem: DecayArrays, valid: Any = None
  ) -> jax.Array:
    """[C, K] bfloat16: the decay of queries from the chunk's start (`intra_chunk.BEFORE`), or of
    keys to its end (`intra_chunk.AFTER`), in a chunk of `valid` tokens, or a whole one."""
    valid = self.chunk if valid is None else valid
    log_decay = gmem.log_decay.at[at.head]
    decay = intra_chunk.ConstantDecayFactors(log_decay, 0, self.read_first, valid, self.chunk)
    return decay.factor(decay.signs(which)).astype(jnp.bfloat16)

  def in_chunk(
    self,
    which: intra_chunk.Exponent,
    factors: jax.Array,
    at: ChunkIndex,
    gmem: DecayArrays,
    states: StateDocuments | None,
  ) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """The arguments of `decay_tile` for a chunk: (factors, select).

    `factors`, computed again in a chunk that ends early, and a function of the tile's value, which
    keeps tokens that see the entering state or reach the leaving one.
    """
    documents = gmem.documents
    of_tokens = (
      documents.select_seeing if which is intra_chunk.BEFORE else documents.select_reaching
    )
    if which is intra_chunk.AFTER and self.length % self.chunk:
      valid = self.length - at.chunk * self.chunk
      again = jnp.where((valid > 0) & (valid < self.chunk), 1, 0)
      recompute = lambda _, x: self.factors(which, at, gmem, valid)
      factors = lax.fori_loop(0, again, recompute, factors)
    return factors, functools.partial(of_tokens, at, states)


def constant_decay(
  options: Options, inputs: Inputs, documents: DocumentBoundaries
) -> ConstantDecay | None:
  """Time-invariant decays per key channel, which scale q and k where they are loaded; or None."""
  if inputs.log_decay.ndim != 2:
    return None
  read_first = inputs.bonus is not None
  return ConstantDecay(
    inputs.log_decay, documents, read_first, options.length, options.config.chunk
  )


def decay_tile(
  tile_smem: Ref, factors: jax.Array, select: Callable[[jax.Array], jax.Array]
) -> None:
  """Multiplies a tile [C, K] by its decay factors, in place, and selects rows."""
  tile_smem[...] = select(load_scaled(tile_smem, factors))


class NormalizerArrays(NamedTuple):
  """Arrays, or GMEM references, of a `Normalizer`."""

  initial: Any
  weights: Any


class NormalizerBuffers(NamedTuple):
  """SMEM of a `Normalizer`."""

  key_sum: Any  # [K] float32
  ones: Any  # [C, 64]: the right operand of the products that sum over tokens


class Normalizer(NamedTuple):
  """Running decayed key sum z: the state for values of 1, or of `weights`."""

  shape: tuple[int, ...]  # (B, H, P, K)
  initial: jax.Array | None  # of that shape, float32, one for each split; None for zeros
  weights: jax.Array | None  # [B, H, T] float32; None for 1
  chunk: int

  @property
  def arrays(self) -> NormalizerArrays:
    """The arrays that the kernel reads from GMEM."""
    return NormalizerArrays(self.initial, self.weights)

  @property
  def scratch(self) -> NormalizerBuffers:
    """SMEM that is kept from chunk to chunk."""
    key_sum = plgpu.SMEM(self.shape[3:], jnp.float32)
    return NormalizerBuffers(key_sum, smem_tile(self.chunk, TILE_WIDTH))

  def out_type(self, ctas: int, chunks: int) -> "StateOutputs":
    """Results, with a leading axis for blocks of columns, so that no two CTAs write the same."""
    B, H, P, K = self.shape
    f32 = lambda *shape: jax.ShapeDtypeStruct((ctas, *shape), jnp.float32)
    return StateOutputs(
      last_key_sum=f32(B, H, P, K), key_sums=f32(B, H, chunks, K) if chunks else None
    )

  def begin(self, smem: NormalizerBuffers, gmem: NormalizerArrays, at: ChunkIndex, split) -> None:
    """Fills the buffers."""
    if self.weights is None:
      fill_ones_column(smem.ones)
    if self.initial is None:
      initial = plgpu.layout_cast(jnp.zeros(self.shape[3:], jnp.float32), ROW_LAYOUT)
    else:
      initial = load_row_vector(gmem.initial.at[at.batch, at.head, split])
    smem.key_sum[...] = initial
    plgpu.commit_smem()

  def load_weights(self, smem: NormalizerBuffers, gmem: NormalizerArrays, at: ChunkIndex) -> None:
    """Stores the weights of the chunk's tokens where the products find them."""
    if self.weights is None:
      return
    weights = load_row_vector(gmem.weights.at[at.batch, at.head, at.tokens])
    rounded = weights.astype(jnp.bfloat16).astype(jnp.float32)
    column = iota(smem.ones.shape, 1)  # two numbers hold a weight to 2^-17
    split = (broadcast_rows(x, column.shape) for x in (rounded, weights - rounded))
    first, second = (jnp.where(column == n, x, 0.0) for n, x in enumerate(split))
    smem.ones[...] = (first + second).astype(jnp.bfloat16)

  def advance(self, smem: NormalizerBuffers, keys_smem: Ref, decay: jax.Array, backend: Backend):
    """Advances the sum by a chunk with these keys [C, K] and this decay [K]."""
    added = backend.sum_rows([keys_smem], smem.ones)
    smem.key_sum[...] = load_row_vector(smem.key_sum) * decay + added
    plgpu.commit_smem()

  def store(self, smem: NormalizerBuffers, target_gmem: Ref) -> None:
    """Copies the sum to [K] in GMEM."""
    store_unoptimized(target_gmem, load_row_vector(smem.key_sum))


class StateOutputs(NamedTuple):
  """Results of the state pipeline, or their GMEM references; None for those not asked for."""

  last_state: Any = None  # [B, H, P, K, V] float32, of each split
  states: Any = None  # [B, H, N, K, V] bfloat16, that enter the chunks
  out: Any = None  # [B, T, H, V] bfloat16
  denominator: Any = None  # [B, H, T] float32
  last_key_sum: Any = None  # [B, H, P, K] float32
  key_sums: Any = None  # [B, H, N, K] float32, that enter the chunks
  overlap: Any = None  # [B, H, N, K] float32, see `chunk_states`

  def merge(self, other: "StateOutputs") -> "StateOutputs":
    """The fields of `other`, and of `self` where they are None."""
    return StateOutputs(*(x if y is None else y for x, y in zip(self, other, strict=True)))

  def of_first_cta(self) -> "StateOutputs":
    """With one of the alike rows of `Normalizer.out_type` and of `denominator`."""
    rows = self.denominator, self.last_key_sum, self.key_sums
    denominator, last_key_sum, key_sums = (None if x is None else x[0] for x in rows)
    return self._replace(denominator=denominator, last_key_sum=last_key_sum, key_sums=key_sums)


class CTA(NamedTuple):
  """Buffers that `Work` uses next to the stage of a chunk."""

  vectors_gmem: Any
  decay_gmem: DecayArrays
  normalizer_gmem: NormalizerArrays | None
  normalizer_smem: NormalizerBuffers | None
  outs_gmem: StateOutputs
  blocks: int  # of 64 columns of values

  def number(self, at: ChunkIndex) -> Any:
    """The place of the CTA among those that share all but the values."""
    return at.block // self.blocks


class Operands(NamedTuple):
  """Arrays that a CTA copies to SMEM or reads from GMEM."""

  # A NamedTuple of what a stage holds: `TileSpec` for what is loaded (a blocked one has 64 columns
  # of values, and each consumer gets its own), a `jax.ShapeDtypeStruct` for what the prologue
  # fills, or None.
  tiles: Any
  vectors: Any  # further arrays, left in GMEM
  decay: ChunkDecay | ConstantDecay
  normalizer: Normalizer | None  # advanced by the prologue
  initial: jax.Array | None  # [B, H, P, K, V] float32, one for each split; None for zeros


class ChunkPrologue(NamedTuple):
  """The producer's work on each chunk, once for all columns of values."""

  begin: Callable  # (at, cta) -> what does not change
  fetch: Callable  # (at, cta) -> vectors of a chunk, loaded during the step before
  # (fixed, fetched, total_decay, at, tiles_smem, cta, wait): `total_decay(at, states)` is the decay
  # over the chunk, tiles are valid after `wait()`. May return a function of work that overlaps with
  # the consumers.
  step: Callable


@dataclasses.dataclass(frozen=True)
class Work:
  """Work of a CTA: results that it computes and stores.

  Attributes:
    consume: `(at, tiles_smem, state_smem, cta, state, decayed) -> (state, out)` for 64 columns of
      values, the block of `at`: from the state and its decayed value to the next state, and the
      columns of the output [C, 64] float32, or None. `state_smem` holds the state in bfloat16 if
      `state_operand`.
    prologue: what the producer does with each chunk, in place; or None.
    out_type: types of what `consume` and `prologue` store; of `out`, if `consume` returns it.
    store_states: whether to return the states that enter the chunks.
    state_operand: whether the state is an operand of a product.
    entering_tile: from the tiles the one in which `consume` leaves the entering state, in bfloat16,
      to be stored; or None. It saves the SMEM of a state; not with an output.
    reverse: whether the last chunk comes first.
  """

  consume: Callable
  prologue: ChunkPrologue | None
  out_type: StateOutputs
  store_states: bool
  state_operand: bool = True
  entering_tile: Callable | None = None
  reverse: bool = False

  @property
  def has_out(self) -> bool:
    """Whether `consume` returns an output."""
    return self.out_type.out is not None

  @property
  def has_state_smem(self) -> bool:
    """Whether the state goes through SMEM of its own."""
    return self.state_operand or (self.store_states and self.entering_tile is None)


class Sizes(NamedTuple):
  """Axes of the arrays, and the splits of a sequence."""

  B: int
  T: int
  H: int
  K: int
  V: int
  num_splits: int


class _Gmem(NamedTuple):
  tiles: Any
  vectors: Any
  decay: DecayArrays
  normalizer: Any
  initial: Any


class _Scratch(NamedTuple):
  stages: Any
  state: Any  # [W, K, 64] bfloat16, the state as an operand or on its way to GMEM
  out: Any  # [W, C, 64]
  normalizer: Any
  barriers: PipelineBarriers
  prologue_barrier: Any

  @classmethod
  def of(cls, operands: Operands, work: Work, K: int, W: int, stages: int, chunk: int):
    """SMEM of so many stages, for W consumers."""
    loaded = [spec for spec in operands.tiles if isinstance(spec, TileSpec)]

    def stages_of(spec):
      size = stages, *([W] if _is_blocked(spec) else []), *spec.shape
      return smem_tile(*size) if len(spec.shape) == 2 else plgpu.SMEM(size, spec.dtype)

    return cls(
      stages=map_refs(stages_of, operands.tiles),
      state=smem_tile(W, K, TILE_WIDTH) if work.has_state_smem else None,
      out=smem_tile(W, chunk, TILE_WIDTH) if work.has_out else None,
      normalizer=None if operands.normalizer is None else operands.normalizer.scratch,
      barriers=PipelineBarriers(
        loaded=plgpu.Barrier(
          num_arrivals=sum(W if spec.blocked else 1 for spec in loaded), num_barriers=stages
        ),
        consumed=plgpu.Barrier(num_arrivals=W, num_barriers=stages),
      ),
      prologue_barrier=None if work.prologue is None else plgpu.Barrier(num_barriers=stages),
    )


def _is_blocked(spec):
  return isinstance(spec, TileSpec) and spec.blocked


class _Warpgroups:
  """A CTA of the state pipeline: its place in the grid, and the programs of its warpgroups."""

  def __init__(
    self, operands: Operands, work: Work, sizes: Sizes, W, stages, chunk, gmem, outs, smem
  ):
    self.operands, self.work, self.chunk = operands, work, chunk
    self.gmem, self.outs, self.smem = gmem, outs, smem
    self.num_chunks = sizes.T // chunk // sizes.num_splits
    row, self.head = lax.axis_index("row"), lax.axis_index("head")
    self.first_block = lax.axis_index("value") * W
    self.batch, self.split = row // sizes.num_splits, lax.rem(row, sizes.num_splits)
    self.pipeline = Pipeline(self.num_chunks, stages, smem.barriers)
    self.cta = CTA(gmem.vectors, gmem.decay, gmem.normalizer, smem.normalizer, outs, W)

  def index_of(self, n, column=0) -> ChunkIndex:
    """The n-th chunk that the CTA processes, and one of its columns of values."""
    M = self.num_chunks
    chunk = self.split * M + (M - 1 - n if self.work.reverse else n)
    return ChunkIndex(self.batch, self.head, chunk, self.first_block + column, self.chunk)

  def load(self, n, column=None) -> None:
    """Starts copies of what all columns share or, with `column`, of what that one has alone."""
    stage = self.pipeline.stage(n, self.smem.stages)
    for spec, source, target in zip(self.operands.tiles, self.gmem.tiles, stage, strict=True):
      if isinstance(spec, TileSpec) and spec.blocked == (column is not None):
        target = target.at[column] if spec.blocked else target
        source = source.at[spec.index(self.index_of(n, 0 if column is None else column))]
        plgpu.copy_gmem_to_smem(source, target, self.pipeline.loaded_barrier(n))

  def produce(self) -> None:
    """The producer: loads what columns share, and runs the prologue of each chunk."""
    prologue, normalizer, smem = self.work.prologue, self.operands.normalizer, self.smem
    if prologue is None:
      self.pipeline.produce(self.load)
      return

    def begin():
      at = self.index_of(0)
      if normalizer is not None:
        normalizer.begin(smem.normalizer, self.gmem.normalizer, at, self.split)
      return self.operands.decay.of_chunk(self.gmem.decay), prologue.begin(at, self.cta)

    def step(n, fixed, fetched, wait):
      total_decay, fixed = fixed
      at, stage = self.index_of(n), self.pipeline.stage(n, smem.stages)
      return prologue.step(fixed, fetched, total_decay, at, stage, self.cta, wait)

    def end():
      at = self.index_of(0)
      if normalizer is not None:
        place = self.cta.number(at), self.batch, self.head, self.split
        normalizer.store(smem.normalizer, self.outs.last_key_sum.at[place])

    fetch = lambda n: prologue.fetch(self.index_of(n), self.cta)
    self.pipeline.produce(self.load, Prologue(begin, fetch, step, end, smem.prologue_barrier))

  def consume(self, column) -> None:
    """A consumer: 64 columns of values, whose state it carries from the first chunk to the last."""
    at_last = self.index_of(0, column)
    total_decay = self.operands.decay.of_chunk(self.gmem.decay)
    self.pipeline.fill(lambda n: self.load(n, column))
    advance = lambda n, state: self.advance(n, column, total_decay, state)
    of_split = lambda ref: ref.at[self.batch, self.head, self.split, :, at_last.channels]
    start = zero_accumulator(self.outs.last_state.shape[3], TILE_WIDTH)
    if self.gmem.initial is not None:
      start = plgpu.load(of_split(self.gmem.initial), layout=plgpu.Layout.WGMMA, optimized=False)
    of_split(self.outs.last_state)[...] = lax.fori_loop(0, self.num_chunks, advance, start)
    plgpu.wait_smem_to_gmem(0)
    if self.work.entering_tile is not None:
      self.release(self.num_chunks - 1, column)

  def release(self, n, column) -> None:
    """A consumer does not read the stage of chunk n any more, and refills its own part of it."""
    stages = self.pipeline.num_stages
    self.pipeline.release(n)
    pl.when(n + stages < self.num_chunks)(lambda: self.load(n + stages, column))

  def advance(self, n, column, total_decay, state):
    """Mainloop of a consumer: the state after chunk n; stores what the chunk leaves."""
    work, smem, pipeline = self.work, self.smem, self.pipeline
    at, stage = self.index_of(n, column), pipeline.stage(n, smem.stages)
    stage = type(stage)(
      *(
        ref.at[column] if _is_blocked(spec) else ref
        for spec, ref in zip(self.operands.tiles, stage, strict=True)
      )
    )
    state_smem: Any = None if smem.state is None else smem.state.at[column]
    out_smem: Any = None if smem.out is None else smem.out.at[column]
    state_gmem: Any = None
    if work.store_states:
      state_gmem = self.outs.states.at[at.batch, at.head, at.chunk, :, at.channels]
    decay_of_chunk = total_decay(at)
    if work.entering_tile is not None:
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      pl.when(n > 0)(lambda: self.release(n - 1, column))
    if work.has_state_smem:
      if work.store_states:
        plgpu.wait_smem_to_gmem(int(work.has_out), wait_read_only=True)
      state_smem[...] = state.astype(jnp.bfloat16)
      plgpu.commit_smem()
    if work.store_states and work.entering_tile is None:
      plgpu.copy_smem_to_gmem(state_smem, state_gmem)
    pipeline.wait_loaded(n)
    if work.prologue is not None:
      plgpu.barrier_wait(smem.prologue_barrier.at[pipeline.slot(n)])
    decayed = state * broadcast_rows(decay_of_chunk, state.shape)
    state, out = work.consume(at, stage, state_smem, self.cta, state, decayed)
    plgpu.commit_smem()  # reads into registers come before copies into the same SMEM
    if work.entering_tile is None:
      self.release(n, column)
    else:
      plgpu.copy_smem_to_gmem(work.entering_tile(stage), state_gmem)
    if work.has_out:  # epilogue
      plgpu.wait_smem_to_gmem(int(work.store_states), wait_read_only=True)
      out_smem[...] = out.astype(jnp.bfloat16)
      plgpu.commit_smem()
      target = self.outs.out.at[at.batch, at.tokens, at.head, at.channels]
      plgpu.copy_smem_to_gmem(out_smem, target)
    return state


@with_int32_indices
def run_state_pipeline(
  operands: Operands,
  work: Work,
  sizes: Sizes,
  *,
  name: str,  # of the kernel in profiles
  config: PipelineConfig,
  chunk: int,
  backend: Backend,
) -> StateOutputs:
  """Carries the state along the chunks of each split of each sequence and head."""
  B, T, H, K, V, P = sizes
  W, stages = config.consumers, min(config.num_stages, T // chunk // P)
  out_type = work.out_type._replace(
    last_state=jax.ShapeDtypeStruct((B, H, P, K, V), jnp.float32),
    states=jax.ShapeDtypeStruct((B, H, T // chunk, K, V), jnp.bfloat16)
    if work.store_states
    else None,
  )

  def body(gmem: _Gmem, outs: StateOutputs, smem: _Scratch):
    warpgroups = _Warpgroups(operands, work, sizes, W, stages, chunk, gmem, outs, smem)
    warpgroup = lax.axis_index("warpgroup")
    pl.when(warpgroup == 0)(warpgroups.produce)
    pl.when(warpgroup > 0)(lambda: warpgroups.consume(warpgroup - 1))

  tiles, vectors, decay, normalizer, initial = operands
  arrays = map_refs(lambda spec: spec.array if isinstance(spec, TileSpec) else None, tiles)
  normalizer_arrays = None if normalizer is None else normalizer.arrays
  return launch_pipeline(
    body,
    _Gmem(arrays, vectors, decay.arrays, normalizer_arrays, initial),
    out_type,
    _Scratch.of(operands, work, K, W, stages, chunk),
    grid=(V // config.value_tile, H, B * P),
    num_warpgroups=1 + W,
    name=name,
    backend=backend,
    compiler_params=WITHOUT_SCRATCH,
  )


class _StateTiles(NamedTuple):
  a: Any
  b: Any
  paired: Any


def chunk_states(
  a: jax.Array,  # [B, T, H or fewer, K] bfloat16, T a multiple of the chunk
  b: jax.Array,  # [B, T, H or fewer, V] bfloat16
  weight: jax.Array | None,  # [B|1, H, T|C] float32, or None for 1
  decay: ChunkDecay | ConstantDecay,  # a `ConstantDecay` decays `a` too
  initial: jax.Array | None,  # [B, H, P, K, V] float32, one for each split, or None for zeros
  normalizer: Normalizer | None = None,  # of `a`
  paired: jax.Array | None = None,  # [B, H, N, K, V] bfloat16
  *,
  heads: int,  # H, of which groups may share one of a or b
  options: Options,
  reverse: bool = False,
  store_states: bool = True,
) -> StateOutputs:
  """Runs the recurrence above in `options.num_splits` independent splits of the sequence.

  Returns `StateOutputs` without `out`, `denominator`; with `paired` `overlap` is the sum over V of
  the entering state times `paired`.
  """
  backend, C, config = options.backend, options.config.chunk, options.config.states
  (B, T, _, V), K = b.shape, a.shape[3]
  which = intra_chunk.BEFORE if reverse else intra_chunk.AFTER
  out_type = StateOutputs()
  constant = decay if isinstance(decay, ConstantDecay) else None
  if normalizer is not None:
    out_type = normalizer.out_type(V // config.value_tile, T // C if store_states else 0)
  if paired is not None:
    # Columns of values apart, so that no two threads write the same numbers.
    shape = V // TILE_WIDTH, *paired.shape[:4]
    out_type = out_type._replace(overlap=jax.ShapeDtypeStruct(shape, jnp.float32))

  def begin(at, cta):
    return None if constant is None else constant.factors(which, at, cta.decay_gmem)

  def fetch(at, cta):
    states = cta.decay_gmem.documents.load_states(at)
    return states, None if weight is None else load_row_vector(at.table_row(cta.vectors_gmem))

  def step(factors, fetched, total_decay, at, stage, cta, wait):
    states, weights = fetched
    in_chunk: Any = None
    if constant is not None:
      in_chunk = constant.in_chunk(which, factors, at, cta.decay_gmem, states)
    if normalizer is not None:
      decay_of_chunk = total_decay(at, states)
      normalizer.load_weights(cta.normalizer_smem, cta.normalizer_gmem, at)
      if store_states:
        target = cta.outs_gmem.key_sums.at[cta.number(at), at.batch, at.head, at.chunk]
        normalizer.store(cta.normalizer_smem, target)
    wait()
    if constant is not None:
      decay_tile(stage.a, *in_chunk)
    if weights is not None:
      for column in range(stage.b.shape[0]):
        b_smem = stage.b.at[column]
        weighted = load_tile(b_smem) * broadcast_rows(weights, b_smem.shape)
        b_smem[...] = weighted.astype(jnp.bfloat16)
    if normalizer is None:
      return None
    return lambda: normalizer.advance(cta.normalizer_smem, stage.a, decay_of_chunk, backend)

  def consume(at, stage, state_smem, cta, state, decayed):
    del state_smem
    if paired is not None:
      overlap = jnp.sum(load_tile(stage.paired) * state, axis=1)
      target = cta.outs_gmem.overlap.at[at.block, at.batch, at.head, at.chunk]
      store_unoptimized(target, overlap)
      if store_states:
        entering_smem = stage.paired  # `paired` has been read
        entering_smem[...] = state.astype(jnp.bfloat16)
    return backend.dot(transpose_ref(stage.a), stage.b, start=decayed), None

  specs, idle = Tiles(C, heads), weight is None and constant is None and normalizer is None
  tiles = _StateTiles(
    specs.tokens(a),
    specs.token_block(b),
    None if paired is None else state_value_block_tile(paired),
  )
  results = run_state_pipeline(
    Operands(tiles, weight, decay, normalizer, initial),
    Work(
      consume,
      None if idle else ChunkPrologue(begin, fetch, step),
      out_type,
      store_states,
      state_operand=False,
      entering_tile=(lambda stage: stage.paired) if paired is not None and store_states else None,
      reverse=reverse,
    ),
    Sizes(B, T, heads, K, V, options.num_splits),
    name="linear_attention_states_" + ("reverse" if reverse else "forward"),
    config=config,
    chunk=C,
    backend=backend,
  )
  if paired is not None:
    results = results._replace(overlap=results.overlap.sum(0))
  return results.of_first_cta()
