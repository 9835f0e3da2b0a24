"""Tensor-core products, tiles in SMEM, row and column vectors: shared by all kernels.

A kernel is written once. What compiled and interpreted kernels must do differently is inside
`Backend`, which an entry point creates.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE_WIDTH = 64  # columns of a tile: 128 bytes of bfloat16, one swizzle
ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)  # registers of a vector with one number per tile row
COL_LAYOUT = plgpu.Layout.WGMMA.reduce(0)  # ... per tile column
COMPILER_PARAMS = plgpu.CompilerParams(
  approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
)
# For kernels in which no sum crosses warps: more SMEM for tiles.
WITHOUT_SCRATCH = dataclasses.replace(COMPILER_PARAMS, reduction_scratch_bytes=0)
# ... and in which every barrier of a warpgroup is written out: JAX adds two to each store.
WITHOUT_BARRIERS = dataclasses.replace(WITHOUT_SCRATCH, unsafe_no_auto_barriers=True)

# A reference to GMEM or SMEM, or a slice or transpose of one: the types are private to JAX.
Ref = Any


def smem_tile(*shape: int, tile: int = TILE_WIDTH) -> Any:
  """SMEM for bfloat16 operands of WGMMA. The last axis is a multiple of `tile`.

  So is what a product contracts; with a tile of 16 columns it may be of that size, too.
  """
  transforms = plgpu.TilingTransform((8, tile)), plgpu.SwizzleTransform(2 * tile)
  return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


def zero_accumulator(*shape: int) -> jax.Array:
  """float32 zeros in the layout of an accumulator."""
  return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def load_tile(ref: Ref) -> jax.Array:
  """Loads a tile into registers, as float32."""
  return plgpu.load(ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


def load_scaled(ref: Ref, factor: jax.Array) -> jax.Array:
  """Loads a tile times `factor`, both in bfloat16: half the instructions of a float32 product."""
  return plgpu.load(ref, layout=plgpu.Layout.WGMMA) * factor.astype(jnp.bfloat16)


def load_row_vector(ref: Ref) -> jax.Array:
  """Loads a vector with one number per tile row."""
  return plgpu.load(ref, layout=ROW_LAYOUT, optimized=False)


def load_col_vector(ref: Ref) -> jax.Array:
  """Loads a vector with one number per tile column."""
  return plgpu.load(ref, layout=COL_LAYOUT, optimized=False)


def broadcast_rows(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Repeats a row vector along the columns of a tile."""
  return lax.broadcast_in_dim(vector, shape, [0])


def broadcast_cols(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Repeats a column vector along the rows of a tile."""
  return lax.broadcast_in_dim(vector, shape, [1])


def equal_mask(ids: Ref) -> jax.Array:
  """[C, C] bool: whether entries i (row) and j (column) of a vector of C numbers are equal."""
  shape = ids.shape * 2
  return broadcast_rows(load_row_vector(ids), shape) == broadcast_cols(load_col_vector(ids), shape)


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
  """Row (0) or column (1) numbers of a tile."""
  return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def causal_mask(
  size: int, *, strict: bool = False, transposed: bool = False, rank: int = 1
) -> jax.Array:
  """[C, C] bool: whether token j is at or, if `strict`, before token i.

  Rows are i and columns j; the other way round if `transposed`. A token has `rank` of each, a power
  of two.
  """
  rows, cols = iota((size, size), 0), iota((size, size), 1)
  if rank > 1:
    rows, cols = rows & -rank, cols & -rank
  if transposed:
    return rows < cols if strict else rows <= cols
  return rows > cols if strict else rows >= cols


def transpose_ref(ref: Ref) -> Ref:
  """The transpose of a tile, as an operand of WGMMA."""
  return ref.transpose((1, 0))


def fill_ones_column(ref: Ref) -> None:
  """Fills a tile with ones in its first column and zeros in the others."""
  first = iota(ref.shape, 1) == 0
  ref[...] = jnp.where(first, jnp.float32(1.0), 0.0).astype(jnp.bfloat16)


def store_unoptimized(ref: Ref, value: jax.Array) -> None:
  """Stores registers to GMEM in a layout that need not fill whole cache lines."""
  if hasattr(plgpu, "store"):  # JAX 0.12 rejects such a store unless it is asked for
    plgpu.store(ref, value, optimized=False)
  else:
    ref[...] = value


def map_refs(function, buffers):
  """Applies `function` to every reference of a NamedTuple; fields that are None stay None."""
  return type(buffers)(*(None if ref is None else function(ref) for ref in buffers))


class Dots(NamedTuple):
  """start + a @ b + ... over the pairs (a, b); a `start` of None is zero."""

  pairs: Sequence[tuple[Any, Ref]]
  start: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Backend:
  """A kernel compiled for Hopper or interpreted on a CPU; bodies do not ask which.

  On the GPU a product may read its left operand from registers and accumulate onto a value. The
  interpreter of JAX 0.11 can do neither: there a product starts from zero and is added, and
  `to_lhs` stages its operand in SMEM.
  """

  interpret: Any = None  # `plgpu.InterpretGPUParams`, or None to compile

  def dot(self, a: Any, b: Ref, start: jax.Array | None = None) -> jax.Array:
    """start + a @ b in float32: `dots` of a single product."""
    return self.dots(Dots([(a, b)], start))[0]

  def dots(self, *sums: Dots) -> tuple[Any, ...]:
    """Issues the WGMMAs of all sums, then waits for all of them.

    Waiting here forbids overlap of products with other work of the same warpgroup, by design:
    overlap comes from the other warpgroups and from the second CTA of an SM.

    In each pair, `a` is a tile or what `to_lhs` returned, `b` a tile.
    """
    if self.interpret is not None:
      return tuple(_interpreted(*one) for one in sums)

    def issue(accumulators):
      for accumulator, (pairs, _) in zip(accumulators, sums, strict=True):
        for a, b in pairs:
          plgpu.wgmma(accumulator, a, b)
      plgpu.wgmma_wait(0)

    starts = [zero_accumulator(*_shape(pairs)) if x is None else x for pairs, x in sums]
    return tuple(pl.run_state(issue)([plgpu.ACC.init(x) for x in starts]))

  def overlapped(self, work: Callable[[], Any], *sums: Dots) -> tuple[Any, ...]:
    """(the result of `work`, *`dots(*sums)`): the same warpgroup works while the products run.

    `work` must neither wait for them nor start others.
    """
    if self.interpret is not None:
      return (work(), *self.dots(*sums))

    def issue(*accumulators):
      for accumulator, (pairs, start) in zip(accumulators, sums, strict=True):
        if start is not None:
          accumulator[...] = start
        for a, b in pairs:
          plgpu.wgmma(accumulator, a, b)
      done = work()
      plgpu.wgmma_wait(0)
      return done, *(x[...] for x in accumulators)

    shapes = [plgpu.ACC(_shape(pairs), jnp.float32) for pairs, _ in sums]
    done, *results = pl.run_scoped(issue, *shapes)
    return (done, *lax.optimization_barrier(results))

  def staggered(self, first: Dots, second: Dots, work: Callable[[jax.Array], Any]) -> Any:
    """(`work` of the sum `first`, the sum `second`): it is done while the second products run.

    `work` ends with a wait for a barrier of the kernel. That is a branch: within a block, the
    compiler waits for products as early as it can. It returns no operand of WGMMA: where registers
    of one change while products run, the compiler lets all of them run one by one.
    """
    if self.interpret is not None:
      return work(self.dots(first)[0]), self.dots(second)[0]

    def issue(*accumulators):
      sums = list(zip(accumulators, (first, second), strict=True))
      for accumulator, (_, start) in sums:
        if start is not None:
          accumulator[...] = start
      for accumulator, (pairs, _) in sums:
        for a, b in pairs:
          plgpu.wgmma(accumulator, a, b)
      result = plgpu.wgmma_accumulator_load(accumulators[0], wait_n=len(second.pairs))
      done = work(lax.optimization_barrier(result))
      plgpu.wgmma_wait(0)
      return done, accumulators[1][...]

    shapes = [plgpu.ACC(_shape(pairs), jnp.float32) for pairs, _ in (first, second)]
    return lax.optimization_barrier(pl.run_scoped(issue, *shapes))

  def to_lhs(self, value: jax.Array, scratch_smem: Ref | None, *index: Any) -> Any:
    """Rounds `value` to bfloat16 as the left operand of WGMMA: in registers on the GPU.

    `scratch_smem`: what `lhs_scratch` allocated, used by the interpreter only, at `index`.
    """
    value = value.astype(jnp.bfloat16)
    if self.interpret is None:
      return value
    assert scratch_smem is not None
    scratch_smem = scratch_smem.at[index] if index else scratch_smem
    scratch_smem[...] = value
    plgpu.commit_smem()
    return scratch_smem

  def lhs_scratch(self, *shape: int, tile: int = TILE_WIDTH) -> Any:
    """SMEM for `to_lhs`, a `smem_tile`; None on the GPU."""
    return None if self.interpret is None else smem_tile(*shape, tile=tile)

  def sum_rows(self, tiles: Sequence[Ref], ones_smem: Ref) -> jax.Array:
    """[X] float32: the sum over the rows of tiles [C, X].

    A product with `ones_smem` [C, 64] (`fill_ones_column`): much cheaper than `jnp.sum(axis=0)`,
    whose sums cross warps.
    """
    pairs = [(transpose_ref(x), ones_smem) for x in tiles]
    return jnp.sum(self.dots(Dots(pairs))[0], axis=1)

  def materialize(self, tree: Any) -> Any:
    """Returns `tree`, computed once.

    XLA, which compiles interpreted kernels, would compute a long chain of values again for every
    reader of its end.
    """
    return tree if self.interpret is None else lax.optimization_barrier(tree)

  def commit(self) -> None:
    """A barrier of the warpgroup, behind which products and copies read what was stored in SMEM."""
    plgpu.commit_smem()

  def barrier(self) -> None:
    """A barrier of the warpgroup alone.

    Unlike `commit` it neither waits for stores to GMEM nor makes stores to SMEM visible to
    asynchronous copies.
    """
    plgpu.wait_smem_to_gmem(8, wait_read_only=True)

  def start_copies(self, copies: Sequence[tuple[Ref, Ref]]) -> None:
    """Starts copies of SMEM that was just written, pairs (SMEM, GMEM); also a barrier."""
    self.commit()
    for source_smem, target_gmem in copies:
      plgpu.copy_smem_to_gmem(source_smem, target_gmem, commit_group=False)
    if copies:
      plgpu.commit_smem_to_gmem_group()

  def wait_copies(self, number: int = 0, *, wait_read_only: bool = True) -> None:
    """Waits for all but the last `number` of `start_copies`, or until they have read SMEM."""
    plgpu.wait_smem_to_gmem(number, wait_read_only=wait_read_only)

  def pipeline(
    self,
    body: Callable[..., Any],
    *,
    grid: tuple[int],
    max_concurrent_steps: int,
    init_carry: Any,
    in_specs: Sequence[Any],
  ) -> Callable[..., Any]:
    """`plgpu.emit_pipeline`, for streams along one axis and results that `body` copies itself."""
    how = {"grid": grid, "max_concurrent_steps": max_concurrent_steps, "init_carry": init_carry}
    return plgpu.emit_pipeline(body, in_specs=in_specs, **how)

  def store_folded(self, ref: Ref, value: jax.Array) -> None:
    """Stores [A * B, C] registers as [A, B, C] SMEM."""
    if self.interpret is None:  # registers cannot be reshaped, nor the interpreter's memory
      ref.reshape(*value.shape)[...] = value
    else:
      ref[...] = value.reshape(ref.shape)

  def load_folded(self, ref: Ref, shape: tuple[int, ...]) -> jax.Array:
    """Loads [A, B, C] SMEM as [A * B, C] registers."""
    if self.interpret is None:
      return plgpu.load(ref.reshape(*shape), layout=plgpu.Layout.WGMMA, optimized=False)
    return ref[...].reshape(shape)


def _shape(pairs):
  a, b = pairs[0]
  return a.shape[0], b.shape[1]


def _interpreted(pairs, start):
  total = 0.0 if start is None else start
  for a, b in pairs:

    def product(accumulator, a=a, b=b):
      plgpu.wgmma(accumulator, a, b)
      return accumulator[...]

    total = total + pl.run_scoped(product, plgpu.ACC(_shape(pairs), jnp.float32))
  return total


def with_int32_indices(kernel):
  """Traces a kernel with 32-bit indices also where the program around it enables 64 bits.

  However often it is traced: the rule of `plgpu.kernel` for `vmap` traces the body once more, which
  under `jax.checkpoint` happens long after the call, with 64 bits enabled. And inside `shard_map`
  without the varying axes of its arguments, which a pipeline in a kernel loses on the way (JAX
  0.11); the results then vary as the arguments do together. Arrays come as positional arguments or
  in trees of these.
  """

  @functools.wraps(kernel)
  def wrapper(*args, **kwargs):
    leaves, tree = jax.tree.flatten(args)
    places = [n for n, x in enumerate(leaves) if isinstance(x, jax.Array)]

    def of_arrays(*arrays):
      filled = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
      with jax.enable_x64(False):
        return kernel(*jax.tree.unflatten(tree, filled.values()), **kwargs)

    arrays = [leaves[n] for n in places]
    late = jax.config.jax_enable_x64 or _varying_axes(arrays)
    return _traced(of_arrays)(*arrays) if late else of_arrays(*arrays)

  return wrapper


def traced_once(*static):
  """Decorator of a kernel's launch, as `with_int32_indices`; calls with equal arguments share it.

  JAX traces the kernel once for equal shapes and values of the arguments named `static`, and a
  program has it once: the forward pass and its gradient, all norms and convolutions of a layer with
  the same sizes. Else each call would be traced, lowered and compiled by itself. So the launch must
  depend on nothing but its arguments.
  """
  return lambda kernel: jax.jit(with_int32_indices(kernel), static_argnames=static, inline=True)


def _varying_axes(arrays):
  return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))


def _traced(function):
  """`function` of arrays, traced as it is called, or mapped, for arrays that do not vary along the
  axes of a mesh."""

  @jax.custom_batching.custom_vmap
  def call(*arrays):
    plain = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(*plain)
    results = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *arrays)
    if axes := tuple(_varying_axes(arrays)):
      results = [jax.lax.pcast(x, axes, to="varying") for x in results]
    return jax.tree.unflatten(jax.tree.structure(shapes), results)

  @call.def_vmap
  def mapped(size, batched, *arrays):
    over = [0 if x else None for x in batched]
    results = _traced(jax.vmap(function, over, axis_size=size))(*arrays)
    return results, jax.tree.map(lambda _: True, results)

  return call
