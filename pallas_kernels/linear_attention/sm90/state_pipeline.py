"""The recurrent state along the chunks of a sequence: the inter-chunk pipeline of linear attention.

    S_{n+1} = diag(decay_n) S_n + sum over the tokens j of chunk n of  a_j w_j b_j^T

A CTA has the columns of values of one `value_tile`, of one head, of one split of a sequence. Its
producer warpgroup loads what the columns share and runs the prologue of each chunk; each consumer
warpgroup loads the rest for its own 64 columns and carries their state [K, 64] in registers.

`run_state_pipeline` is the frame, used by the output kernels in `forward.py` and by `chunk_states`
here, which computes the states at all chunk boundaries alone: forward (a = keys, b = values), or in
reverse for the gradient of the state (a = queries, b = the cotangent of the output).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.boundaries import DocumentBoundaries, select_rows
from pallas_kernels.core.chunk_grid import (
  ChunkIndex,
  TileSpec,
  state_value_block_tile,
  token_block_tile,
  token_tile,
)
from pallas_kernels.core.pipeline import Pipeline, PipelineBarriers, Prologue, launch_pipeline
from pallas_kernels.core.wgmma import (
  CHUNK,
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

  def of_chunk(self, gmem: DecayArrays) -> Callable[[ChunkIndex], jax.Array]:
    """A function of the chunk: [K] float32, the decay of the state over it."""

    def total(at):
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

  @property
  def arrays(self) -> DecayArrays:
    """The arrays that the kernel reads from GMEM."""
    return DecayArrays(log_decay=self.log_decay, documents=self.documents.reset_only)

  def of_chunk(self, gmem: DecayArrays) -> Callable[[ChunkIndex], jax.Array]:
    """A function of the chunk: [K] float32, the decay of the state over it."""
    log_decay = load_row_vector(gmem.log_decay.at[lax.axis_index("head")])
    rate = jnp.maximum(log_decay, intra_chunk.SMALLEST_LOG_DECAY)

    def total(at):
      tokens = jnp.clip(self.length - at.chunk * CHUNK, 0, CHUNK).astype(jnp.float32)
      return gmem.documents.keeps_state(at, jnp.exp(rate * tokens))

    return total

  def factors(self, which: str, at: ChunkIndex, gmem: DecayArrays, valid: Any = CHUNK) -> jax.Array:
    """[C, K] bfloat16: the decay of queries from the chunk's start (`intra_chunk.BEFORE`), or of
    keys to its end (`intra_chunk.AFTER`), in a chunk of `valid` tokens."""
    decay = intra_chunk.ConstantDecayFactors(gmem.log_decay.at[at.head], 0, self.read_first, valid)
    return decay.factor(decay.span(which)).astype(jnp.bfloat16)

  def in_chunk(self, which: str, factors: jax.Array, at: ChunkIndex, gmem: DecayArrays):
    """The arguments of `decay_tile` for a chunk: (factors, rows).

    `factors`, computed again in a chunk that ends early, and a [C] vector, above 0 for tokens that
    see the entering state or reach the leaving one; or None.
    """
    before = which is intra_chunk.BEFORE
    rows = (gmem.documents.sees_entering_state if before else gmem.documents.reaches_leaving_state)(
      at
    )
    if which is intra_chunk.AFTER and self.length % CHUNK:
      valid = self.length - at.chunk * CHUNK
      again = jnp.where((valid > 0) & (valid < CHUNK), 1, 0)
      recompute = lambda _, x: self.factors(which, at, gmem, valid)
      factors = lax.fori_loop(0, again, recompute, factors)
    return factors, rows


def constant_decay(
  options: Options, inputs: Inputs, documents: DocumentBoundaries
) -> ConstantDecay | None:
  """Time-invariant decays per key channel, which scale q and k where they are loaded; or None."""
  if inputs.log_decay.ndim != 2:
    return None
  return ConstantDecay(inputs.log_decay, documents, inputs.bonus is not None, options.length)


def decay_tile(tile_smem: Ref, factors: jax.Array, rows: jax.Array | None) -> None:
  """Multiplies a tile [C, K] by its decay factors, in place; 0 in rows that are not above 0."""
  value = load_scaled(tile_smem, factors)
  tile_smem[...] = select_rows(rows, value, jnp.bfloat16(0.0))


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

  @property
  def arrays(self) -> NormalizerArrays:
    """The arrays that the kernel reads from GMEM."""
    return NormalizerArrays(self.initial, self.weights)

  @property
  def scratch(self) -> NormalizerBuffers:
    """SMEM that is kept from chunk to chunk."""
    return NormalizerBuffers(plgpu.SMEM(self.shape[3:], jnp.float32), smem_tile(CHUNK, TILE_WIDTH))

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
    column = iota((CHUNK, TILE_WIDTH), 1)  # two numbers hold a weight to 2^-17
    split = (broadcast_rows(x, column.shape) for x in (rounded, weights - rounded))
    first, second = (jnp.where(column == n, x, 0.0) for n, x in enumerate(split))
    smem.ones[...] = (first + second).astype(jnp.bfloat16)

  def advance(self, smem: NormalizerBuffers, keys_smem: Ref, decay: jax.Array, mma: Backend):
    """Advances the sum by a chunk with these keys [C, K] and this decay [K]."""
    added = mma.sum_rows([keys_smem], smem.ones)
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
  """Buffers that the callbacks of the state pipeline use next to the stage of a chunk."""

  vectors_gmem: Any
  decay_gmem: DecayArrays
  normalizer_gmem: NormalizerArrays | None
  normalizer_smem: NormalizerBuffers | None
  outs_gmem: StateOutputs
  blocks: int  # of 64 columns of values

  def number(self, at: ChunkIndex) -> Any:
    """The place of the CTA among those that share all but the values."""
    return at.block // self.blocks


class ChunkPrologue(NamedTuple):
  """The producer's work on each chunk, once for all columns of values."""

  begin: Callable  # (at, cta) -> what does not change
  # (fixed, total_decay, at, tiles_smem, cta, wait): `total_decay(at)` is the decay over the chunk,
  # tiles are valid after `wait()`. May return a function of work that overlaps with the consumers.
  step: Callable


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


@with_int32_indices
def run_state_pipeline(
  consume: Callable,
  prologue: ChunkPrologue | None,
  tiles: Any,
  decay: ChunkDecay | ConstantDecay,
  vectors: Any,
  normalizer: Normalizer | None,
  initial: jax.Array | None,
  out_type: StateOutputs,
  *,
  shape: tuple[int, int, int, int, int],
  num_splits: int = 1,
  reverse: bool = False,
  store_states: bool = True,
  state_operand: bool = True,
  entering_tile: Callable | None = None,
  name: str,
  config: PipelineConfig,
  backend: Backend,
) -> StateOutputs:
  """Carries the state along the chunks of each split of each sequence and head.

  Args:
    consume: `(at, tiles_smem, state_smem, cta, state, decayed) -> (state, out)` for 64 columns of
      values, the block of `at`: from the state and its decayed value to the next state, and the
      columns of the output [C, 64] float32, or None. `state_smem` holds the state in bfloat16 if
      `state_operand`.
    prologue: what the producer does with each chunk, in place; or None.
    tiles: a NamedTuple of what a stage holds: `TileSpec` for what is loaded (a blocked one has 64
      columns of values, and `consume` gets its own), a `jax.ShapeDtypeStruct` for what the prologue
      fills, or None.
    vectors: further arrays, left in GMEM.
    normalizer: advanced by the prologue, or None.
    initial: [B, H, P, K, V] float32, one for each split, or None for zeros.
    out_type: types of what `consume` and `prologue` store; of `out`, if `consume` returns it.
    shape: (B, T, H, K, V).
    store_states: whether to return the states that enter the chunks.
    entering_tile: from the tiles the one in which `consume` leaves the entering state, in bfloat16,
      to be stored; or None. It saves the SMEM of a state; not with an output.
    name: of the kernel in profiles.
  """
  (B, T, H, K, V), C = shape, CHUNK
  N, W = T // C, config.value_tile // TILE_WIDTH
  M = N // num_splits
  num_stages = min(config.num_stages, M)
  has_state_smem = state_operand or (store_states and entering_tile is None)
  has_out = out_type.out is not None
  out_type = out_type._replace(
    last_state=jax.ShapeDtypeStruct((B, H, num_splits, K, V), jnp.float32),
    states=jax.ShapeDtypeStruct((B, H, N, K, V), jnp.bfloat16) if store_states else None,
  )
  loaded = [spec for spec in tiles if isinstance(spec, TileSpec)]

  def stages_of(spec):
    size = num_stages, *([W] if isinstance(spec, TileSpec) and spec.blocked else []), *spec.shape
    return smem_tile(*size) if len(spec.shape) == 2 else plgpu.SMEM(size, spec.dtype)

  scratch = _Scratch(
    stages=map_refs(stages_of, tiles),
    state=smem_tile(W, K, TILE_WIDTH) if has_state_smem else None,
    out=smem_tile(W, C, TILE_WIDTH) if has_out else None,
    normalizer=None if normalizer is None else normalizer.scratch,
    barriers=PipelineBarriers(
      loaded=plgpu.Barrier(
        num_arrivals=sum(W if spec.blocked else 1 for spec in loaded), num_barriers=num_stages
      ),
      consumed=plgpu.Barrier(num_arrivals=W, num_barriers=num_stages),
    ),
    prologue_barrier=None if prologue is None else plgpu.Barrier(num_barriers=num_stages),
  )

  def body(gmem: _Gmem, outs: StateOutputs, smem: _Scratch):
    row, head = lax.axis_index("row"), lax.axis_index("head")
    first_block = lax.axis_index("value") * W
    batch, split = row // num_splits, lax.rem(row, num_splits)
    warpgroup = lax.axis_index("warpgroup")
    pipeline = Pipeline(M, num_stages, smem.barriers)
    cta = CTA(gmem.vectors, gmem.decay, gmem.normalizer, smem.normalizer, outs, W)

    def index_of(n, column=0):
      chunk = split * M + (M - 1 - n if reverse else n)
      return ChunkIndex(batch, head, chunk, first_block + column)

    def load(n, column=None):
      """Starts copies of what all columns share or, with `column`, of what that one has alone."""
      stage = pipeline.stage(n, smem.stages)
      for spec, source, target in zip(tiles, gmem.tiles, stage, strict=True):
        if isinstance(spec, TileSpec) and spec.blocked == (column is not None):
          target = target.at[column] if spec.blocked else target
          source = source.at[spec.index(index_of(n, 0 if column is None else column))]
          plgpu.copy_gmem_to_smem(source, target, pipeline.loaded_barrier(n))

    @pl.when(warpgroup == 0)
    def _producer():
      if prologue is None:
        pipeline.produce(load)
        return

      def begin():
        at = index_of(0)
        if normalizer is not None:
          normalizer.begin(smem.normalizer, gmem.normalizer, at, split)
        return decay.of_chunk(gmem.decay), prologue.begin(at, cta)

      def step(n, fixed, wait):
        total_decay, fixed = fixed
        at, stage = index_of(n), pipeline.stage(n, smem.stages)
        return prologue.step(fixed, total_decay, at, stage, cta, wait)

      def end():
        at = index_of(0)
        if normalizer is not None:
          target = outs.last_key_sum.at[cta.number(at), batch, head, split]
          normalizer.store(smem.normalizer, target)

      pipeline.produce(load, Prologue(begin, step, end, smem.prologue_barrier))

    @pl.when(warpgroup > 0)
    def _consumer():
      column = warpgroup - 1
      at_last = index_of(0, column)
      total_decay = decay.of_chunk(gmem.decay)
      pipeline.fill(lambda n: load(n, column))

      def release(n):
        pipeline.release(n)
        pl.when(n + num_stages < M)(lambda: load(n + num_stages, column))

      def mainloop(n, state):
        at, stage = index_of(n, column), pipeline.stage(n, smem.stages)
        stage = type(stage)(
          *(
            ref.at[column] if isinstance(spec, TileSpec) and spec.blocked else ref
            for spec, ref in zip(tiles, stage, strict=True)
          )
        )
        state_smem: Any = None if smem.state is None else smem.state.at[column]
        out_smem: Any = None if smem.out is None else smem.out.at[column]
        state_gmem: Any = None
        if store_states:
          state_gmem = outs.states.at[at.batch, at.head, at.chunk, :, at.channels]
        decay_of_chunk = total_decay(at)
        if entering_tile is not None:
          plgpu.wait_smem_to_gmem(0, wait_read_only=True)
          pl.when(n > 0)(lambda: release(n - 1))
        if has_state_smem:
          if store_states:
            plgpu.wait_smem_to_gmem(int(has_out), wait_read_only=True)
          state_smem[...] = state.astype(jnp.bfloat16)
          plgpu.commit_smem()
        if store_states and entering_tile is None:
          plgpu.copy_smem_to_gmem(state_smem, state_gmem)
        pipeline.wait_loaded(n)
        if prologue is not None:
          plgpu.barrier_wait(smem.prologue_barrier.at[pipeline.slot(n)])
        decayed = state * broadcast_rows(decay_of_chunk, state.shape)
        state, out = consume(at, stage, state_smem, cta, state, decayed)
        plgpu.commit_smem()  # reads into registers come before copies into the same SMEM
        if entering_tile is None:
          release(n)
        else:
          plgpu.copy_smem_to_gmem(entering_tile(stage), state_gmem)
        if has_out:  # epilogue
          plgpu.wait_smem_to_gmem(int(store_states), wait_read_only=True)
          out_smem[...] = out.astype(jnp.bfloat16)
          plgpu.commit_smem()
          target = outs.out.at[at.batch, at.tokens, at.head, at.channels]
          plgpu.copy_smem_to_gmem(out_smem, target)
        return state

      of_split = lambda ref: ref.at[batch, head, split, :, at_last.channels]
      start = zero_accumulator(K, TILE_WIDTH)
      if gmem.initial is not None:
        start = plgpu.load(of_split(gmem.initial), layout=plgpu.Layout.WGMMA, optimized=False)
      of_split(outs.last_state)[...] = lax.fori_loop(0, M, mainloop, start)
      plgpu.wait_smem_to_gmem(0)
      if entering_tile is not None:
        release(M - 1)

  arrays = map_refs(lambda spec: spec.array if isinstance(spec, TileSpec) else None, tiles)
  normalizer_arrays = None if normalizer is None else normalizer.arrays
  return launch_pipeline(
    body,
    _Gmem(arrays, vectors, decay.arrays, normalizer_arrays, initial),
    out_type,
    scratch,
    grid=(V // (W * TILE_WIDTH), H, B * num_splits),
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
  num_splits: int = 1,
  reverse: bool = False,
  store_states: bool = True,
  config: PipelineConfig,
  backend: Backend,
) -> StateOutputs:
  """Runs the recurrence above in `num_splits` independent splits of the sequence.

  Returns `StateOutputs` without `out`, `denominator`; with `paired` `overlap` is the sum over V of
  the entering state times `paired`.
  """
  mma, V = backend, b.shape[-1]
  tiles = _StateTiles(
    token_tile(a, heads),
    token_block_tile(b, heads),
    None if paired is None else state_value_block_tile(paired),
  )
  which = intra_chunk.BEFORE if reverse else intra_chunk.AFTER
  out_type = StateOutputs()
  constant = decay if isinstance(decay, ConstantDecay) else None
  if normalizer is not None:
    out_type = normalizer.out_type(
      V // config.value_tile, a.shape[1] // CHUNK if store_states else 0
    )
  if paired is not None:
    # Columns of values apart, so that no two threads write the same numbers.
    shape = V // TILE_WIDTH, *paired.shape[:4]
    out_type = out_type._replace(overlap=jax.ShapeDtypeStruct(shape, jnp.float32))

  def begin(at, cta):
    return None if constant is None else constant.factors(which, at, cta.decay_gmem)

  def step(factors, total_decay, at, stage, cta, wait):
    in_chunk: Any = None
    if constant is not None:
      in_chunk = constant.in_chunk(which, factors, at, cta.decay_gmem)
    if normalizer is not None:
      decay_of_chunk = total_decay(at)
      normalizer.load_weights(cta.normalizer_smem, cta.normalizer_gmem, at)
      if store_states:
        target = cta.outs_gmem.key_sums.at[cta.number(at), at.batch, at.head, at.chunk]
        normalizer.store(cta.normalizer_smem, target)
    weights = None
    if weight is not None:
      weights = load_row_vector(at.table_row(cta.vectors_gmem))
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
    return lambda: normalizer.advance(cta.normalizer_smem, stage.a, decay_of_chunk, mma)

  def consume(at, stage, state_smem, cta, state, decayed):
    del state_smem
    if paired is not None:
      overlap = jnp.sum(load_tile(stage.paired) * state, axis=1)
      target = cta.outs_gmem.overlap.at[at.block, at.batch, at.head, at.chunk]
      store_unoptimized(target, overlap)
      if store_states:
        entering_smem = stage.paired  # `paired` has been read
        entering_smem[...] = state.astype(jnp.bfloat16)
    return mma.dot(transpose_ref(stage.a), stage.b, start=decayed), None

  idle = weight is None and constant is None and normalizer is None
  results = run_state_pipeline(
    consume,
    None if idle else ChunkPrologue(begin, step),
    tiles,
    decay,
    weight,
    normalizer,
    initial,
    out_type,
    shape=(*b.shape[:2], heads, a.shape[3], V),
    num_splits=num_splits,
    reverse=reverse,
    store_states=store_states,
    state_operand=False,
    entering_tile=(lambda stage: stage.paired) if paired is not None and store_states else None,
    name="linear_attention_states_" + ("reverse" if reverse else "forward"),
    config=config,
    backend=backend,
  )
  if paired is not None:
    results = results._replace(overlap=results.overlap.sum(0))
  return results.of_first_cta()
