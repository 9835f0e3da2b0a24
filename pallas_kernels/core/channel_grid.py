"""Grid and pipeline of kernels that scan along time with one thread per channel.

A CTA is one warpgroup of 128 threads and takes 128 channels of one sequence, or of one split of it.
The recurrent state stays in registers; tokens stream through SMEM in chunks. `pipeline` is the time
loop of a CTA:

  prologue   TMA copies fill the `stages` SMEM slots of every stream with the first chunks
  mainloop   per chunk: wait until the results of the chunk before the last have left SMEM; compute
             from SMEM to SMEM, state in registers; start the copy of the results to GMEM and that
             of the chunk `stages` ahead into the slot that is free now
  epilogue   wait for the last copies; the caller stores the final state from registers

That is on Hopper; the kernels for all GPUs since Ampere copy through registers (`Mma.pipeline`).

There is no producer warpgroup: a chunk is a long chain of dependent arithmetic in every thread, and
the thread that starts the copies is free again at once.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core import boundaries, device, tuning
from pallas_kernels.core.wgmma import Backend, store_unoptimized

CHANNELS = 128  # per CTA, one per thread
WORD = 32  # tokens whose flags fit in one int32
# No thread reads what another stores but by a copy, and every barrier is written out: JAX adds two
# to each store, 70 to a chunk.
COMPILER_PARAMS = plgpu.CompilerParams(
  lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
)
_ROW_LAYOUT = plgpu.Layout.WG_STRIDED((CHANNELS,), vec_size=1)
_RESERVED = 27 * 1024  # bytes of SMEM for barriers
_BARRIERS = 16  # bytes of a stage
_REDUCTIONS = 2048  # bytes of SMEM for sums that cross warps
_MAX_STAGES = 8
_MIN_SPLIT = 256  # tokens

# Bytes per token and channel of the streams and of the results, by kernel.
Traffic = Mapping[str, tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
  """Tile sizes of `pipeline`."""

  chunk: int  # tokens per chunk
  stages: int  # chunks of the streams in SMEM: one is computed while the others are copied

  def __post_init__(self):
    if self.chunk < 1 or WORD % self.chunk:
      raise ValueError(f"chunk={self.chunk} must divide {WORD}: its flags are bits of an int32.")
    if self.stages < 1:
      raise ValueError(f"stages={self.stages}: not one chunk of {self.chunk} tokens fits in SMEM.")


def fitting_stages(chunk: int, *, bytes_in: float, bytes_out: float) -> int:
  """Stages that fit in SMEM, for so many bytes per token and channel of streams and results."""
  row = chunk * CHANNELS
  room = device.current().smem - _RESERVED
  return min(int((room - 2 * bytes_out * row) // (bytes_in * row)), max_stages())


def max_stages() -> int:
  """The most chunks of a stream in SMEM: one since Ampere, while the next is in registers."""
  return 1 if device.current().architecture == device.AMPERE else _MAX_STAGES


@dataclasses.dataclass(frozen=True)
class ScanConfig:
  """All kernels of a scan; those of `_states` are the first passes over a sequence in splits."""

  op: ClassVar[str]
  group: ClassVar[int]  # tokens whose rows are loaded together

  forward: PipelineConfig
  forward_states: PipelineConfig
  backward: PipelineConfig
  backward_states: PipelineConfig

  def smem(self, shape: Any) -> dict[str, int]:
    """Bytes of SMEM per CTA by kernel."""
    sizes = {}
    for name, (bytes_in, bytes_out) in shape.traffic(self.forward.chunk).items():
      config = getattr(self, name)
      row = config.chunk * CHANNELS
      streams = int(row * (config.stages * bytes_in + 2 * bytes_out))
      sizes[name] = streams + config.stages * _BARRIERS + _REDUCTIONS
    return sizes

  def check(self, shape: Any) -> None:
    """Raises a ValueError where the configuration does not fit the shape or the device."""
    for field in dataclasses.fields(self):
      chunk = getattr(self, field.name).chunk
      if chunk % self.group:
        raise ValueError(
          f"{self.op}: {field.name}.chunk={chunk} must be a multiple of {self.group}."
        )
    tuning.check_smem(self.op, self.smem(shape))


class Coordinates(NamedTuple):
  """The part of the arrays that a CTA works on."""

  channels: Any  # a slice of D
  batch: jax.Array
  split: jax.Array


def coordinates(num_splits: int) -> Coordinates:
  """This CTA's place in a grid of (D / CHANNELS, B * num_splits) CTAs."""
  row = lax.axis_index("row")
  channels = pl.ds(lax.axis_index("channels") * CHANNELS, CHANNELS)
  return Coordinates(channels, row // num_splits, lax.rem(row, num_splits))


def num_splits(batch: int, channels: int, length: int) -> int:
  """Number of splits of a sequence that gives every SM work."""
  return device.current().num_splits(batch * -(-channels // CHANNELS), length, _MIN_SPLIT)


def padded_length(length: int, num_splits: int) -> int:
  """Tokens that the kernels run: every split has the same whole number of chunks of any size."""
  block = WORD * num_splits
  return -(-length // block) * block


def itemsize(arrays) -> int:
  """Bytes per token and channel of all arrays, or dtypes, of a tree."""
  return sum(jnp.dtype(getattr(x, "dtype", x)).itemsize for x in jax.tree.leaves(arrays))


def load_row(ref):
  """One token's 128 channels in float32 registers, from SMEM or GMEM."""
  return plgpu.load(ref, layout=_ROW_LAYOUT, optimized=False).astype(jnp.float32)


def store_row_gmem(ref_gmem, row):
  """Stores one row from registers."""
  store_unoptimized(ref_gmem, row.astype(ref_gmem.dtype))


def full_row(value: float):
  """The same float32 number for every channel."""
  return plgpu.layout_cast(jnp.full((CHANNELS,), value, jnp.float32), _ROW_LAYOUT)


def result_smem(chunk: int, dtype):
  """SMEM for the results of two chunks: one is written while the other leaves."""
  return plgpu.SMEM((2, chunk, CHANNELS), dtype)


def launch(
  name: str,
  body: Callable[..., None],
  inputs: Any,
  out_type: Any,
  smem: Any,
  sizes: tuple[int, int, int],
  backend: Backend,
) -> Any:
  """The results of a kernel with a CTA for every 128 channels of every split of a sequence.

  Args:
    body: `body(inputs, results, smem)`, of trees of references, stores the results.
    inputs, out_type, smem: trees of arrays, of the types of the results, of what a CTA has in SMEM.
    sizes: (B, D, P): sequences, channels, splits of a sequence.
  """
  B, D, P = sizes
  (results,) = plgpu.kernel(
    body,
    out_type=(out_type,),
    scratch_types=[smem],
    grid=(D // CHANNELS, B * P),
    grid_names=("channels", "row"),
    interpret=backend.interpret,
    compiler_params=COMPILER_PARAMS,
    kernel_name=name,
  )(inputs)
  return results


def pipeline(
  compute_chunk: Callable[..., Any],
  carry: Any,
  *,
  config: PipelineConfig,
  streams_gmem: Any,
  first_gmem: Any,
  results_smem: Any,
  results_gmem: Any,
  start: Any,
  num_chunks: int,
  reverse: bool,
  skips: bool = False,
  backend: Backend,
) -> Any:
  """Scans `num_chunks` chunks from token `start` on, the last chunk first if `reverse`.

  Args:
    compute_chunk: `compute_chunk(first_token, streams_smem, is_first, results_smem, carry)` returns
      the next carry: reads a chunk of the streams and stores its results. `is_first(t)` says
      whether token t of the chunk is the first of a document.
    carry: arrays in registers.
    streams_gmem: tree of references, [T, 128] each, or [T / chunk, n, 128]: n rows per chunk.
    first_gmem: [T / chunk], of `boundaries.pack_bits`, or None: then `is_first` is None.
    results_smem: tree of `result_smem`.
    results_gmem: the same tree of references [T, 128].
    skips: whether `is_first` is None also in chunks where no document begins, at the price of
      twice the code.
  """
  C = config.chunk
  chunk_at = lambda n: num_chunks - 1 - n if reverse else n
  sources, streams = jax.tree.flatten(streams_gmem)
  specs = []
  for ref in sources:
    if len(ref.shape) == 3:
      spec = plgpu.BlockSpec((1, *ref.shape[1:]), lambda n: (start // C + chunk_at(n), 0, 0))
    else:
      spec = plgpu.BlockSpec((C, CHANNELS), lambda n: (start // C + chunk_at(n), 0))
    specs.append(spec)
  targets = jax.tree.leaves(results_gmem)

  def load_word(n):
    """The flags of chunk n, in GMEM: they come while the chunk before is computed."""
    return None if first_gmem is None else first_gmem[start // C + chunk_at(n)]

  def step(index, *args):
    (n,) = index
    *arrived, (word, carry) = args
    first_token = start + chunk_at(n) * C
    later_word = load_word(jnp.minimum(n + 1, num_chunks - 1))
    is_first = None if word is None else functools.partial(boundaries.bit, word)
    slot = lax.rem(n, 2)
    if targets:
      backend.wait_copies(1)
    slots_smem = jax.tree.map(lambda buffer: buffer.at[slot], results_smem)
    streams_smem = jax.tree.unflatten(streams, arrived)
    compute = lambda is_first: functools.partial(
      compute_chunk, first_token, streams_smem, is_first, slots_smem
    )
    if skips and word is not None:
      carry = lax.cond(word != 0, compute(is_first), compute(None), carry)
    else:
      carry = compute(is_first)(carry)
    # Also orders the reads above before the next copies into the same slots.
    tokens = pl.ds(first_token, C)
    pairs = zip(jax.tree.leaves(slots_smem), targets, strict=True)
    backend.start_copies([(slot_smem, target.at[tokens]) for slot_smem, target in pairs])
    return later_word, carry

  _, carry = backend.pipeline(
    step,
    grid=(num_chunks,),
    max_concurrent_steps=min(config.stages, num_chunks),
    init_carry=(load_word(0), carry),
    in_specs=specs,
  )(*sources)
  backend.wait_copies(wait_read_only=False)
  return carry
