"""Kernels that process every chunk independently: grid, tiles, decays."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.index import ChunkIndex
from pallas_kernels.core.pipeline import Pipeline, PipelineBarriers
from pallas_kernels.core.wgmma import (
  COMPILER_PARAMS,
  TILE_WIDTH,
  Backend,
  Ref,
  broadcast_cols,
  broadcast_rows,
  iota,
  load_col_vector,
  load_row_vector,
  map_refs,
  smem_tile,
  store_unoptimized,
  with_int32_indices,
)

Copy = tuple[Ref, Ref]  # SMEM source, GMEM target


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["array"],
  meta_fields=["shape", "index", "blocked", "parts", "staged"],
)
@dataclasses.dataclass(frozen=True)
class TileSpec:
  """The part of a GMEM array that a CTA reads or writes: `array[index(at)]`, of `shape`.

  `blocked`: one part for each block of channels. `parts`: into how many parts, one after the other
  in the same tile, the columns are cut. `staged`: in a CTA with several heads one part for each of
  them, which is loaded while the CTA processes another head.
  """

  array: jax.Array | jax.ShapeDtypeStruct
  shape: tuple[int, ...]
  index: Callable[[ChunkIndex], tuple]
  blocked: bool = False
  parts: int = 1
  staged: bool = False

  def index_of_part(self, at: ChunkIndex, part: int) -> tuple:
    """The index of a part of the columns."""
    if self.parts == 1:
      return self.index(at)
    return (*self.index(at), pl.ds(part * self.shape[-1], self.shape[-1]))

  def for_each_head(self) -> "TileSpec":
    """The same part, of each head that a CTA processes."""
    return dataclasses.replace(self, staged=True)

  @property
  def type(self) -> jax.ShapeDtypeStruct:
    """The type of the whole array."""
    return jax.ShapeDtypeStruct(self.array.shape, self.array.dtype)


def shared_head(head, heads: int, x, axis: int = 2):
  """The head of x that `head` of `heads` in all reads: groups of neighbors share one of x."""
  group = heads // x.shape[axis]
  return head if group == 1 else lax.div(head, jnp.int32(group))


def per_head(x, heads: int) -> jax.ShapeDtypeStruct:
  """The type of a result for each of `heads` heads, that are groups of those of x [B, T, G, X].

  Or of sums over several heads of a group each, of which there are `heads`.
  """
  return jax.ShapeDtypeStruct((*x.shape[:2], heads, x.shape[3]), x.dtype)


def sum_of_groups(x: jax.Array, like: jax.Array) -> jax.Array:
  """The gradient of `like` [B, T, G, X] from those of all heads that read it, x [B, T, H, X].

  Or from sums over some of these heads each, which kernels with several heads per CTA return.
  """
  if x.shape == like.shape:
    return x
  B, T, G, X = like.shape
  return x.reshape(B, T, G, -1, X).astype(jnp.float32).sum(3).astype(like.dtype)


class Tiles(NamedTuple):
  """Parts of arrays [B, T, H, X] for chunks of so many tokens and a grid of so many heads.

  An array may have fewer heads, of which groups share one.
  """

  chunk: int
  heads: int

  def tokens(self, x, parts: int = 1) -> TileSpec:
    """A chunk's tokens, all columns. x: [B, T, H, X]."""
    index = lambda at: (at.batch, at.tokens, shared_head(at.head, self.heads, x))
    return TileSpec(x, (self.chunk, x.shape[3] // parts), index, parts=parts)

  def token_block(self, x) -> TileSpec:
    """A chunk's tokens, a block of 64 columns. x: [B, T, H, X]."""
    index = lambda at: (at.batch, at.tokens, shared_head(at.head, self.heads, x), at.channels)
    return TileSpec(x, (self.chunk, TILE_WIDTH), index, True)

  def scores(self, x) -> TileSpec:
    """A chunk's scores. x: [B, H, T, C]."""
    return TileSpec(x, (self.chunk, self.chunk), lambda at: (at.batch, at.head, at.tokens))

  def vector(self, B: int, T: int) -> TileSpec:
    """One float32 number per token, of [B, H, T]."""
    index = lambda at: (at.batch, at.head, at.tokens)
    return TileSpec(_float32(B, self.heads, T), (self.chunk,), index)


def state_tile(x) -> TileSpec:
  """A chunk's state. x: [B, H, N, K, V]."""
  return TileSpec(x, x.shape[3:], lambda at: (at.batch, at.head, at.chunk))


def state_key_block_tile(x, parts: int = 1) -> TileSpec:
  """A block of 64 key channels of a chunk's state. x: [B, H, N, K, V]."""
  index = lambda at: (at.batch, at.head, at.chunk, at.channels)
  return TileSpec(x, (TILE_WIDTH, x.shape[4] // parts), index, True, parts)


def state_value_block_tile(x) -> TileSpec:
  """A block of 64 value columns of a chunk's state. x: [B, H, N, K, V]."""
  index = lambda at: (at.batch, at.head, at.chunk, slice(None), at.channels)
  return TileSpec(x, (x.shape[3], TILE_WIDTH), index, True)


def channel_vector(B: int, H: int, N: int, K: int) -> TileSpec:
  """One float32 number per chunk and channel of a block, of [B, H, N, K]."""
  index = lambda at: (at.batch, at.head, at.chunk, at.channels)
  return TileSpec(_float32(B, H, N, K), (TILE_WIDTH,), index, True)


def _float32(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


class Arrival(NamedTuple):
  """The barriers on which the TMA copies of a tile arrive, one per block."""

  barrier: Ref
  first: int
  copy: Callable[[int, int], None]

  def wait(self, number: Any = 0) -> None:
    """Waits for the tile of the CTA's block `number`."""
    plgpu.barrier_wait(self.barrier.at[self.first + number])

  def start(self, part: int, number: int = 0) -> None:
    """Starts the copy of another part of the columns to the same tile, which nothing reads now."""
    self.copy(part, number)


def wait_all(arrived) -> None:
  """Waits for all tiles of a NamedTuple of `Arrival`."""
  for arrival in arrived:
    if arrival is not None:
      arrival.wait()


class Output(NamedTuple):
  """An output in GMEM; `at` gives a chunk's part."""

  gmem: Ref
  spec: TileSpec

  def at(self, index: ChunkIndex) -> Ref:
    """The part of a chunk."""
    return self.gmem.at[self.spec.index(index)]

  def store(self, index: ChunkIndex, value: jax.Array) -> None:
    """Stores registers, float32, as the part of a chunk."""
    store_unoptimized(self.at(index), value)


class ChunkBuffers(NamedTuple):
  """The buffers of a kernel that processes every chunk independently, each a NamedTuple.

  `tiles_smem` are filled when `arrived` says so; with several blocks per CTA those that are
  `blocked` have a leading axis. `vectors_gmem` are best read before the first wait, while tiles are
  on their way. Tiles that nothing reads any more are good for bfloat16 outputs.
  """

  tiles_smem: Any
  arrived: Any  # of `Arrival`
  vectors_gmem: Any
  scratch_smem: Any
  outs: Any  # of `Output`


def launch_per_chunk(
  body: Callable[..., None],
  arrays: Any,
  out_type: Any,
  scratch: Any,
  *,
  sizes: tuple[int, int, int, int],
  chunk: int,
  name: str,
  backend: Backend,
  compiler_params: plgpu.CompilerParams = COMPILER_PARAMS,
):
  """Runs `body(at, arrays_gmem, outs_gmem, scratch)` in one CTA per block, chunk, head and row.

  `scratch`: SMEM and barriers. `sizes`: how many blocks, chunks, heads and rows there are. `chunk`:
  tokens of one. `name`: in profiles.
  """

  def kernel(arrays_gmem, outs_gmem, scratch):
    place = (lax.axis_index(name) for name in ("row", "head", "chunk", "block"))
    at = ChunkIndex(*place, size=chunk)
    body(at, arrays_gmem, outs_gmem, scratch)

  (results,) = plgpu.kernel(
    kernel,
    out_type=[out_type],  # a tuple would be several results
    scratch_types=[scratch],
    grid=sizes,
    grid_names=("block", "chunk", "head", "row"),
    interpret=backend.interpret,
    kernel_name=name,
    compiler_params=compiler_params,
  )(arrays)
  return results


class _Arrays(NamedTuple):
  tiles: Any
  vectors: Any


class _Scratch(NamedTuple):
  tiles: Any
  scratch: Any
  arrived_barrier: Any
  loaded_barrier: Any = None  # one per stage


@with_int32_indices
def chunk_kernel(
  body: Callable[..., Any],
  tiles: Any,
  vectors: Any,
  outputs: Any,
  *,
  chunk: int,
  per_block: Callable[..., Sequence[Copy]] | None = None,
  blocks: int = 1,
  blocks_per_cta: int = 1,
  heads_per_cta: int = 1,
  num_stages: int = 1,
  scratch: Any = None,
  name: str,
  backend: Backend,
  compiler_params: plgpu.CompilerParams = COMPILER_PARAMS,
):
  """Runs `body(at, buffers)` once for each chunk of each head and sequence.

  With several heads per CTA it is `body(at, buffers, over_heads)`, once for each of their groups:
  `over_heads(step, start)` is `start` passed through `step(at, tiles_smem, wait, carry) -> carry`
  of one head after the other. `wait()` returns when the tiles of the head are loaded, if they are
  `staged`: before it vectors are best read, as they are before a first wait. The others are loaded
  once, for all heads of the CTA. Of `at` in `body`, `head` is the CTA's first.

  Args:
    body: returns the copies, pairs (SMEM, GMEM), by which it writes bfloat16 outputs; float32 ones
      it stores itself. With `per_block` it returns (copies, shared).
    tiles: a NamedTuple of `TileSpec` (or None), which are copied to SMEM in this order.
    vectors: arrays that stay in GMEM.
    outputs: a NamedTuple of `TileSpec` (or None).
    chunk: tokens of a chunk.
    per_block: `(at, number, buffers, shared) -> copies`: what remains to be done for each block of
      64 channels, of which this CTA has `number` = 0, 1, ...
    blocks: blocks of 64 key channels.
    blocks_per_cta: how many of them one CTA processes, one after the other.
    heads_per_cta: how many neighboring heads one CTA processes, one after the other.
    num_stages: heads whose tiles are in SMEM.
    scratch: further SMEM.
    name: of the kernel in profiles.

  Returns:
    `outputs` with arrays.
  """
  present = [spec for spec in tiles if spec is not None]
  loaded_once = [spec for spec in present if not spec.staged]

  def kernel(at, gmem, outs_gmem, smem):
    if heads_per_cta > 1:
      at = at._replace(head=at.head * heads_per_cta)

    def index_of(number):
      return at._replace(block=at.block * blocks_per_cta + number)

    arrivals = []
    for source, spec, target in zip(gmem.tiles, tiles, smem.tiles, strict=True):
      if spec is None or spec.staged:
        arrivals.append(None)
        continue
      first = sum(x is not None for x in arrivals) * blocks_per_cta

      def copy(part, number, source=source, spec=spec, target=target, first=first):
        plgpu.copy_gmem_to_smem(
          source.at[spec.index_of_part(index_of(number), part)],
          target.at[number] if spec.blocked else target,
          smem.arrived_barrier.at[first + number],
        )

      arrivals.append(Arrival(smem.arrived_barrier, first, copy))
      for number in range(blocks_per_cta if spec.blocked else 1):
        copy(0, number)
    outs = [None if x is None else Output(x, o) for x, o in zip(outs_gmem, outputs, strict=True)]
    buffers = ChunkBuffers(
      smem.tiles, type(tiles)(*arrivals), gmem.vectors, smem.scratch, type(outputs)(*outs)
    )
    over_heads: tuple = ()
    if heads_per_cta > 1:
      ring = Pipeline(heads_per_cta, num_stages, PipelineBarriers(smem.loaded_barrier, None))
      over_heads = (_over_heads(ring, at, tiles, gmem.tiles, smem.tiles),)
    result = body(at, buffers, *over_heads)
    copies, shared = result if per_block is not None else (result, None)
    start_copies(copies)

    if per_block is not None:

      def run_block(number, _, per_block=per_block):
        start_copies(per_block(index_of(number), number, buffers, shared))

      if blocks_per_cta == 1:
        run_block(0, None)
      else:
        lax.fori_loop(0, blocks_per_cta, run_block, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  def shape_of(spec):
    copies = [blocks_per_cta] if spec.blocked else [num_stages] if spec.staged else []
    return (*copies, *spec.shape)

  num_staged = len(present) - len(loaded_once)
  B, T, H, _ = present[0].array.shape
  return launch_per_chunk(
    kernel,
    _Arrays(map_refs(lambda spec: spec.array, tiles), vectors),
    map_refs(lambda spec: spec.type, outputs),
    _Scratch(
      map_refs(lambda spec: smem_tile(*shape_of(spec)), tiles),
      scratch,
      plgpu.Barrier(num_barriers=len(loaded_once) * blocks_per_cta),
      plgpu.Barrier(num_arrivals=num_staged, num_barriers=num_stages) if num_staged else None,
    ),
    sizes=(blocks // blocks_per_cta, T // chunk, H // heads_per_cta, B),
    chunk=chunk,
    name=name,
    backend=backend,
    compiler_params=compiler_params,
  )


def _over_heads(ring: Pipeline, at: ChunkIndex, tiles, tiles_gmem, tiles_smem):
  """`over_heads` of `chunk_kernel`; starts the loads of the first heads.

  The warpgroup that reads the stages of the ring refills them, too.
  """
  head_of = lambda number: at._replace(head=at.head + number)

  def load(number):
    for source, spec, target in zip(tiles_gmem, tiles, tiles_smem, strict=True):
      if spec is not None and spec.staged:
        plgpu.copy_gmem_to_smem(
          source.at[spec.index(head_of(number))],
          target.at[ring.slot(number)],
          ring.loaded_barrier(number),
        )

  def tiles_of(number):
    pairs = zip(tiles, tiles_smem, strict=True)
    of_head = lambda spec, ref: ref.at[ring.slot(number)] if spec and spec.staged else ref
    return type(tiles)(*(of_head(spec, ref) for spec, ref in pairs))

  def over_heads(step, start):
    def run_head(number, carry):
      wait = lambda: ring.wait_loaded(number)
      carry = step(head_of(number), tiles_of(number), wait, carry)
      plgpu.commit_smem()  # all warps have read the stage for the last time
      later = number + ring.num_stages
      pl.when(later < ring.num_chunks)(lambda: load(later))
      return carry

    return lax.fori_loop(0, ring.num_chunks, run_head, start)

  ring.fill(load)
  return over_heads


def start_copies(copies: Sequence[Copy]) -> None:
  """Starts copies of SMEM that was just written to GMEM."""
  if copies:
    plgpu.commit_smem()
  for source_smem, target_gmem in copies:
    plgpu.copy_smem_to_gmem(source_smem, target_gmem)


def store_outputs(copies: Sequence[Copy]) -> None:
  """Copies SMEM that was just written to GMEM, and waits until the sources may be reused."""
  start_copies(copies)
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def broadcast_diagonal(square: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """The diagonal of [C, C], repeated along the columns of `shape`."""
  return broadcast_rows(jnp.sum(jnp.where(own_token(square.shape), square, 0.0), axis=1), shape)


def decay_between_tokens(cumulative: Ref, *, transposed: bool = False) -> jax.Array:
  """[C, C]: the decay between tokens j and i, 1 where j is later; rows are i, or j if `transposed`.

  `cumulative` [C]: log decays summed from the chunk's start, in GMEM or SMEM.
  """
  rows, cols = load_row_vector(cumulative), load_col_vector(cumulative)
  return decay_of_sums(rows, cols, transposed=transposed)


def decay_of_sums(rows: jax.Array, cols: jax.Array, *, transposed: bool = False) -> jax.Array:
  """`decay_between_tokens` of the sums as a row and as a column vector."""
  shape = rows.shape * 2
  lag = broadcast_rows(rows, shape) - broadcast_cols(cols, shape)
  return decay_of_lag(lag, transposed=transposed)


def with_own_weight(between: jax.Array, own_weight: Ref, rank: int = 1) -> jax.Array:
  """The decays between tokens [C, C] with weights of tokens in their own outputs [C], in GMEM.

  All `rank` rows of a token have the same weight.
  """
  rows = broadcast_rows(load_row_vector(own_weight), between.shape)
  return jnp.where(own_token(between.shape, rank), rows, between)


def own_token(shape: tuple[int, ...], rank: int = 1) -> jax.Array:
  """[C, C]: the diagonal, or with `rank` rows per token the squares on it."""
  rows, cols = iota(shape, 0), iota(shape, 1)
  return rows == cols if rank == 1 else rows & -rank == cols & -rank


def decay_of_lag(lag: jax.Array, *, transposed: bool = False) -> jax.Array:
  """`decay_between_tokens` of log decays that are summed over the tokens from a column to a row."""
  return jnp.exp(jnp.minimum(-lag if transposed else lag, 0.0))
