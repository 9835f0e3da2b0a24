"""What every kernel here shares: tensor-core products, tiles in shared memory, decay vectors.

A kernel is written once. On the GPU a product may read its left operand from registers and adds
into an accumulator that holds a value already; the CPU interpreter of JAX 0.11 can do neither, and
`multiply` hides the difference.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

CHUNK = 64  # steps in a chunk: the rows of a tensor-core product
GROUP = 64  # key channels that a kernel with a decay per channel works on at a time
ROWS = plgpu.Layout.WGMMA.reduce(1)  # how a vector lies that has one number per row of a tile
COLUMNS = plgpu.Layout.WGMMA.reduce(0)  # ... per column
COMPILER_PARAMS = plgpu.CompilerParams(
  approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
)
# For kernels in which no sum crosses warps: more shared memory for tiles.
WITHOUT_SCRATCH = dataclasses.replace(COMPILER_PARAMS, reduction_scratch_bytes=0)
_TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def tile(*shape, dtype=jnp.bfloat16):
  """Shared memory for operands of a product. The last axis is a multiple of 64."""
  return plgpu.SMEM(shape, dtype, transforms=_TRANSFORMS)


def zeros(*shape):
  """float32 zeros, laid out as an accumulator."""
  return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def load(ref):
  """A tile, as float32 in registers."""
  return plgpu.load(ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


def scaled(ref, factor):
  """A tile times `factor`, both in bfloat16: half the instructions of the float32 product."""
  return plgpu.load(ref, layout=plgpu.Layout.WGMMA) * factor.astype(jnp.bfloat16)


def rows_of(ref):
  """A vector with one number per row."""
  return plgpu.load(ref, layout=ROWS, optimized=False)


def columns_of(ref):
  """A vector with one number per column."""
  return plgpu.load(ref, layout=COLUMNS, optimized=False)


def across(rows, shape):
  """Repeats a vector of rows along the columns of a tile."""
  return lax.broadcast_in_dim(rows, shape, [0])


def down(columns, shape):
  """Repeats a vector of columns along the rows of a tile."""
  return lax.broadcast_in_dim(columns, shape, [1])


def alike(ids):
  """[C, C]: whether row i and column j of a vector of C numbers are equal."""
  shape = (CHUNK, CHUNK)
  return across(rows_of(ids), shape) == down(columns_of(ids), shape)


def iota(shape, axis):
  """Row (0) or column (1) numbers of a tile."""
  return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def turned(ref):
  """The transpose of a tile, for a product."""
  return ref.transpose((1, 0))


def unit(ref):
  """Fills a tile with ones in its first column and zeros in the others."""
  first = iota(ref.shape, 1) == 0
  ref[...] = jnp.where(first, jnp.float32(1.0), 0.0).astype(jnp.bfloat16)


def sum_of_rows(tiles, unit, interpret):
  """[X] float32: the sum over the rows of tiles [C, X], by a product with a `unit` tile [C, 64].

  Much cheaper than `jnp.sum(axis=0)`, whose sums cross warps.
  """
  shape = tiles[0].shape[1], unit.shape[1]
  products = [(turned(x), unit) for x in tiles]
  return jnp.sum(multiply((shape, products), interpret=interpret)[0], axis=1)


def store_anywhere(ref, value):
  """Stores registers into device memory in a layout that need not fill whole cache lines."""
  if hasattr(plgpu, "store"):  # JAX 0.12 refuses such a store unless it is asked for
    plgpu.store(ref, value, optimized=False)
  else:
    ref[...] = value


def multiply(*sums, interpret):
  """Tensor-core products, all issued before the first is waited for.

  Each of `sums` is (start, [(a, b), ...]) and gives start + a @ b + ...: `start` a float32
  accumulator, or a shape to start from zero; `a` a `tile` or bfloat16 registers, `b` a `tile`.
  Under interpretation a register operand is `(registers, scratch tile)`: `staged` makes that pair.
  """
  if interpret is not None:
    return tuple(_interpreted(start, products) for start, products in sums)

  def issue(accumulators):
    for accumulator, (_, products) in zip(accumulators, sums, strict=True):
      for a, b in products:
        plgpu.wgmma(accumulator, a, b)
    plgpu.wgmma_wait(0)

  starts = [zeros(*start) if isinstance(start, tuple) else start for start, _ in sums]
  return tuple(pl.run_state(issue)([plgpu.ACC.init(x) for x in starts]))


def _interpreted(start, products):
  total = 0.0 if isinstance(start, tuple) else start
  for a, b in products:

    def product(accumulator, a=a, b=b):
      plgpu.wgmma(accumulator, a, b)
      return accumulator[...]

    shape = start if isinstance(start, tuple) else start.shape
    total = total + pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))
  return total


def staged(value, scratch, interpret):
  """`value` rounded to bfloat16 as the left operand of a product: in registers on the GPU."""
  value = value.astype(jnp.bfloat16)
  if interpret is None:
    return value
  scratch[...] = value
  plgpu.commit_smem()
  return scratch


def stage_for(rows, columns, interpret):
  """Shared memory for `staged`; next to none on the GPU."""
  return tile(rows, columns) if interpret is not None else tile(8, 64)


def in_32_bits(kernel):
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
