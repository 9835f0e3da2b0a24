"""The frame of kernels that walk along time with one thread for each channel.

A block has 128 threads and as many channels of one sequence. Steps come through shared memory, many
of them on the way at a time, and results go back through it; what is carried along time stays in
registers.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import chip
from pallas_kernels.tensor_core import store_anywhere

CHANNELS = 128  # of a block: a thread each
FLAGS = 32  # flags of steps arrive in groups: 128 bytes, the least that a copy moves
LAYOUT = plgpu.Layout.WG_STRIDED((CHANNELS,), vec_size=1)
_SHARED_MEMORY = 200 * 1024  # bytes for steps on their way: what a block can have, and some room
_ROWS = (32, 16, 8)  # steps in a chunk
_FEWEST_STAGES = 4
_MOST_STAGES = 8


def sizes(*, read, written) -> tuple[int, int]:
  """(steps in a chunk, chunks on their way) for so many bytes of a channel's step.

  The longest chunks are taken of which enough fit in shared memory.
  """
  for rows in _ROWS:
    on_their_way = stages(rows, read=read, written=written)
    if on_their_way >= _FEWEST_STAGES:
      return rows, on_their_way
  raise ValueError(f"{read=} and {written=} bytes a step do not fit in shared memory.")


def stages(rows, *, read, written) -> int:
  """How many chunks of `rows` steps are on their way."""
  step = rows * CHANNELS
  return min(int((_SHARED_MEMORY - 2 * written * step) // (read * step)), _MOST_STAGES)


def parts(batch: int, channels: int, length: int) -> int:
  """Into how many parts to cut a sequence so that all multiprocessors have work."""
  return chip.parts(batch * -(-channels // CHANNELS), length, 256)


def padded_length(length: int, number_of_parts: int) -> int:
  """The steps that the kernels run: the same number of whole groups of flags in every part."""
  block = FLAGS * number_of_parts
  return -(-length // block) * block


def row(ref):
  """A row of 128 channels in shared memory, in float32 registers."""
  return plgpu.load(ref, layout=LAYOUT).astype(jnp.float32)


def row_anywhere(ref):
  """The same from device memory."""
  return plgpu.load(ref, layout=LAYOUT, optimized=False).astype(jnp.float32)


def full(value):
  """The same float32 number for every channel."""
  return plgpu.layout_cast(jnp.full((CHANNELS,), value, jnp.float32), LAYOUT)


def put_anywhere(ref, value):
  """Stores a row into device memory."""
  store_anywhere(ref, value.astype(ref.dtype))


def computed(tree, interpret):
  """The arrays, computed once: XLA, which compiles what is interpreted, would compute a whole chain
  of steps again for each reader."""
  return tree if interpret is None else lax.optimization_barrier(tree)


def buffer(rows, dtype):
  """Shared memory for the results of two chunks: one is written while the other leaves."""
  return plgpu.SMEM((2, rows, CHANNELS), dtype)


def walk(chunk, carry, *, steps, flags, results, start, count, rows, stages, backwards):
  """Walks along `count` chunks of `rows` steps from step `start`, the last chunk first if
  `backwards`.

  Args:
    chunk: `chunk(first, refs, flag, buffers, carry) -> carry`: reads the rows of `refs` in shared
      memory, writes those of `buffers`; `flag(t)` is whether flag t is set; `first` is the number
      of the chunk's first step.
    steps: references in device memory, [T, 128] each, by name, or [T / rows, n, 128]: n rows for
      each chunk.
    flags: reference in device memory, [T] int32, or None: then `flag` is None.
    results: (`buffer`, reference in device memory [T, 128]) by name.
  """
  place = lambda n: count - 1 - n if backwards else n
  specs, sources = [], []
  for ref in steps.values():
    if len(ref.shape) == 3:
      spec = plgpu.BlockSpec((1, *ref.shape[1:]), lambda n: (start // rows + place(n), 0, 0))
    else:
      spec = plgpu.BlockSpec((rows, CHANNELS), lambda n: (start // rows + place(n), 0))
    specs.append(spec)
    sources.append(ref)
  if flags is not None:
    specs.append(plgpu.BlockSpec((FLAGS,), lambda n: ((start + place(n) * rows) // FLAGS,)))
    sources.append(flags)

  def step(index, *args):
    (n,) = index
    *arrived, carry = args
    first = start + place(n) * rows
    flag = None
    if flags is not None:
      *arrived, group = arrived
      offset = lax.rem(first, FLAGS)
      flag = lambda t: group[offset + t] != 0
    slot = lax.rem(n, 2)
    if results:
      plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    buffers = {name: memory.at[slot] for name, (memory, _) in results.items()}
    carry = chunk(first, dict(zip(steps, arrived, strict=True)), flag, buffers, carry)
    # Also orders the reads above before the pipeline's next copies into the same memory.
    plgpu.commit_smem()
    for name, (_, target) in results.items():
      plgpu.copy_smem_to_gmem(buffers[name], target.at[pl.ds(first, rows)], commit_group=False)
    if results:
      plgpu.commit_smem_to_gmem_group()
    return carry

  carry = plgpu.emit_pipeline(
    step,
    grid=(count,),
    max_concurrent_steps=min(stages, count),
    init_carry=carry,
    in_specs=specs,
  )(*sources)
  plgpu.wait_smem_to_gmem(0)
  return carry
