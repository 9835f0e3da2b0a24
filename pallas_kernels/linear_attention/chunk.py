"""The frame of kernels that work on every chunk apart, and what their bodies share."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear_attention import gates
from pallas_kernels.tensor_core import (
  CHUNK,
  COMPILER_PARAMS,
  GROUP,
  across,
  alike,
  in_32_bits,
  iota,
  store_anywhere,
  tile,
)


class Place(NamedTuple):
  """Which chunk, and which 64 key channels of it, a block of threads has."""

  b: jax.Array
  h: jax.Array
  n: jax.Array
  group: jax.Array

  @property
  def steps(self):
    """The steps of the chunk."""
    return pl.ds(self.n * CHUNK, CHUNK)

  @property
  def channels(self):
    """The group's channels."""
    return pl.ds(self.group * GROUP, GROUP)

  def rows(self, ref):
    """The chunk's part of a vector [B|1, H, T|C] in device memory."""
    steps = self.steps if ref.shape[2] > CHUNK else pl.ds(0, CHUNK)
    return ref.at[self.b if ref.shape[0] > 1 else 0, self.h, steps]


class Piece(NamedTuple):
  """The part of an array that a block of threads reads or writes, for each group if `grouped`."""

  array: jax.Array | jax.ShapeDtypeStruct
  shape: tuple[int, ...]
  index: Callable[[Place], tuple]
  grouped: bool = False


def steps_of(x):
  """A chunk's steps. x: [B, T, H, X]."""
  return Piece(x, (CHUNK, x.shape[3]), lambda at: (at.b, at.steps, at.h))


def channels_of(x):
  """A chunk's steps, of one group of channels. x: [B, T, H, K]."""
  return Piece(x, (CHUNK, GROUP), lambda at: (at.b, at.steps, at.h, at.channels), True)


def scores_of(x):
  """A chunk's scores. x: [B, H, T, C]."""
  return Piece(x, (CHUNK, CHUNK), lambda at: (at.b, at.h, at.steps))


def state_of(x):
  """A chunk's state. x: [B, H, N, K, V]."""
  return Piece(x, x.shape[3:], lambda at: (at.b, at.h, at.n))


def state_channels_of(x):
  """A chunk's state, of one group of channels. x: [B, H, N, K, V]."""
  return Piece(x, (GROUP, x.shape[4]), lambda at: (at.b, at.h, at.n, at.channels), True)


def rows_to(B, H, T):
  """One float32 number for each step, into [B, H, T]."""
  return Piece(_float32(B, H, T), (CHUNK,), lambda at: (at.b, at.h, at.steps))


def columns_to(B, H, N, K):
  """One float32 number for each channel of a group, into [B, H, N, K]."""
  return Piece(_float32(B, H, N, K), (GROUP,), lambda at: (at.b, at.h, at.n, at.channels), True)


def _float32(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def each_chunk(
  body, inputs, out_type, scratch, *, sizes, interpret, compiler_params=COMPILER_PARAMS
):
  """Calls `body(place, inputs, outputs, scratch)` for each group of channels, chunk, head and row.

  Args:
    scratch: shared memory and barriers.
    sizes: how many groups, chunks, heads and rows there are.
  """

  def kernel(ins, outs, s):
    at = Place(*(lax.axis_index(name) for name in ("row", "head", "chunk", "group")))
    body(at, ins, outs, s)

  return plgpu.kernel(
    kernel,
    out_type=out_type,
    scratch_types=[scratch],
    grid=sizes,
    grid_names=("group", "chunk", "head", "row"),
    interpret=interpret,
    compiler_params=compiler_params,
  )(inputs)


@in_32_bits
def all_chunks(
  chunk,
  tiles,
  vectors,
  outputs,
  *,
  groups=1,
  together=1,
  scratch=None,
  reuse=None,
  interpret,
  compiler_params=COMPILER_PARAMS,
):
  """Calls `chunk(place, refs, scratch, wait, put)` once for each chunk of each head and sequence.

  Args:
    chunk: works on tiles, in `scratch` after `wait(name)` or, for all of them, `wait()`, and on
      vectors, in `refs`, in device memory: to be read before the first `wait`, while the tiles are
      on their way. It calls `put(name, value)` for each output. With groups it returns a function
      `(place, number)` that does what remains for each, with `number` as a further argument of
      `wait` and, after the place, of `put`.
    tiles: pieces that are copied to shared memory, under their names.
    vectors: arrays, or None for those that are absent.
    outputs: pieces. float32 is written from registers, the others by way of shared memory.
    groups: groups of key channels.
    together: how many of them one block of threads has, one after the other. Pieces of a group are
      stacked in `scratch` if it has several.
    scratch: further shared memory.
    reuse: for bfloat16 outputs, the name of a tile that nothing reads any more when they are put.
  """
  vectors = {name: x for name, x in vectors.items() if x is not None}
  reuse = reuse or {}
  first = tiles["v" if "v" in tiles else "d_out"].array
  scratch = dict(scratch or {})
  for name, piece in tiles.items():
    scratch[name] = tile(*([together] if piece.grouped else []), *piece.shape)
  scratch["arrived"] = plgpu.Barrier(num_barriers=len(tiles) * together)

  def body(at, ins, outs, s):
    barrier = lambda name, number: s["arrived"].at[list(tiles).index(name) * together + number]
    place_of = lambda number: at._replace(group=at.group * together + number)
    for name, piece in tiles.items():
      for number in range(together if piece.grouped else 1):
        source = ins[name].at[piece.index(place_of(number))]
        target = s[name].at[number] if piece.grouped else s[name]
        plgpu.copy_gmem_to_smem(source, target, barrier(name, number))

    def wait(name=None, number=0):
      for awaited in tiles if name is None else [name]:
        plgpu.barrier_wait(barrier(awaited, number))

    def put(name, value, place=at, number=0):
      target = outs[name].at[outputs[name].index(place)]
      if name not in reuse:
        store_anywhere(target, value)  # float32: whole sectors of 32 bytes
        return
      source = s[reuse[name]]
      if tiles[reuse[name]].grouped:
        source = source.at[number]
      source[...] = value.astype(source.dtype)
      copies.append((source, target))

    def send():
      if copies:
        plgpu.commit_smem()
      for source, target in copies:
        plgpu.copy_smem_to_gmem(source, target)
      copies.clear()

    def group(number, carry):
      rest(place_of(number), number)
      send()
      return carry

    copies = []
    rest = chunk(at, ins, s, wait, put)
    send()
    if rest is not None and together == 1:
      group(0, None)
    elif rest is not None:
      lax.fori_loop(0, together, group, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  return each_chunk(
    body,
    {name: piece.array for name, piece in tiles.items()} | vectors,
    {
      name: jax.ShapeDtypeStruct(piece.array.shape, piece.array.dtype)
      for name, piece in outputs.items()
    },
    scratch,
    sizes=(groups // together, first.shape[1] // CHUNK, first.shape[2], first.shape[0]),
    interpret=interpret,
    compiler_params=compiler_params,
  )


def fetch(pieces, arrived):
  """Copies pieces of device memory into tiles and waits for all of them."""
  for index, (source, target) in enumerate(pieces.values()):
    plgpu.copy_gmem_to_smem(source, target, arrived.at[index])
  for index in range(len(pieces)):
    plgpu.barrier_wait(arrived.at[index])


def same_segment(ins, at):
  """[C, C]: whether two steps of the chunk belong to one segment."""
  return alike(ins["segments"].at[at.b, at.steps])


def diagonal(square, shape):
  """The diagonal of [C, C], repeated along the columns of `shape`."""
  on = iota(square.shape, 0) == iota(square.shape, 1)
  return across(jnp.sum(jnp.where(on, square, 0.0), axis=1), shape)


def gate_scratch(log_decay, width=GROUP):
  """Shared memory for `make_gate`."""
  if log_decay.ndim == 2:
    return {}
  largest = plgpu.SMEM((2 * CHUNK,), jnp.float32)
  split = {"high": tile(CHUNK, width), "low": tile(CHUNK, width)}
  return split | {"signs": tile(CHUNK, CHUNK), "largest": largest}


def make_gate(log_decay, first, s, b, h, n, channels, *, length, read_first, interpret, signs=None):
  """The decays of `channels` in chunk n.

  `log_decay`: [H, K] or [B, T, H, K], in device memory; `first`: which merge is the first that they
  need; `length`: steps before padding; `signs`: of a gate for other channels of the same chunk.
  """
  if len(log_decay.shape) == 4:
    log_decay = log_decay.at[b, pl.ds(n * CHUNK, CHUNK), h, channels]
    signs = signs or gates.Signs(s["signs"], read_first)
    return gates.StepGates(log_decay, s["high"], s["low"], signs, interpret)
  valid = jnp.minimum(length - n * CHUNK, CHUNK)
  return gates.ConstantGates(log_decay.at[h, channels], first, read_first, valid)
