"""Configurations of linear attention's kernels. Never keyed on a length."""

import dataclasses
from typing import NamedTuple

from pallas_kernels.core import device, tuning
from pallas_kernels.core.wgmma import TILE_WIDTH

KEY_WIDTHS = (64, 128)  # what q and k are padded to
VALUE_WIDTHS = (64, 128, 256)  # what v is padded to
CHUNK = 64  # tokens, unless a configuration says otherwise
NARROWEST = 32  # narrower heads are padded more than twofold, which has not been measured
_BARRIERS = 1024  # bytes of SMEM, at most, for barriers
_REDUCTIONS = 2048  # bytes of SMEM for sums that cross warps


class Shape(NamedTuple):
  """Padded sizes, for which a configuration is chosen."""

  batch: int
  length: int
  heads: int  # H
  groups: int  # heads of k, if q has as many and v has H; otherwise H
  key_width: int
  value_width: int
  decay: str  # axes of `log_decay`: "BTH", "HK" or "BTHK"; "BTH" also for a constant per head
  normalize: bool

  @property
  def shape_class(self) -> str:
    """The key of a device's table."""
    shared = "-shared" if self.groups < self.heads else ""
    sizes = f"{self.decay}-K{self.key_width}-V{self.value_width}-bfloat16"
    return sizes + ("-normalized" if self.normalize else "") + shared

  @property
  def blocks(self) -> int:
    """Blocks of 64 key channels."""
    return self.key_width // TILE_WIDTH


@dataclasses.dataclass(frozen=True)
class ScoresConfig:
  """How scores are computed, for decays per key channel.

  Attributes:
    chunks_per_cta: chunks that a CTA processes, one after the other; two of them are in SMEM.
  """

  chunks_per_cta: int

  def __post_init__(self):
    _check_positive(self)


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
  """How the state pipeline runs.

  Attributes:
    value_tile: value columns per CTA; one consumer warpgroup has 64 of them.
    num_stages: chunks whose inputs are in SMEM.
  """

  value_tile: int
  num_stages: int

  def __post_init__(self):
    if self.value_tile not in (64, 128):
      raise ValueError(
        f"value_tile={self.value_tile} must be 64 or 128: a consumer warpgroup has {TILE_WIDTH} "
        "columns, and the registers of an SM are enough for two of them and the producer."
      )
    if self.num_stages < 2:
      raise ValueError(
        f"num_stages={self.num_stages} must be at least 2: the prologue of a chunk runs before the "
        "stage of the chunk before is loaded again, and would wait forever for its own."
      )

  @property
  def consumers(self) -> int:
    """Consumer warpgroups."""
    return self.value_tile // TILE_WIDTH


@dataclasses.dataclass(frozen=True)
class ChunkConfig:
  """How a kernel runs that has a CTA for every chunk: the gradients of queries, and of keys.

  Attributes:
    heads_per_cta: heads that a CTA processes, one after the other, adding up their gradients;
      scalar decays whose heads share queries and keys.
    head_stages: heads whose tiles are in the SMEM of such a CTA.
    blocks_per_cta: blocks of 64 key channels that a CTA processes, one after the other; decays per
      key channel.
    value_parts: parts of the value columns that take turns in SMEM; decays per key channel.
  """

  heads_per_cta: int = 1
  head_stages: int = 1
  blocks_per_cta: int = 1
  value_parts: int = 1

  def __post_init__(self):
    _check_positive(self)


@dataclasses.dataclass(frozen=True)
class Config:
  """All kernels of linear attention over many tokens for Hopper.

  Attributes:
    scores: decays per key channel only.
    outputs: the forward pass along the chunks.
    states: of a sequence in splits, and the cotangents of states.
    separate_values: dv has a kernel of its own, where the one for dk could compute it; decays per
      key channel only.
    chunk: tokens of a chunk.
  """

  scores: ScoresConfig
  outputs: PipelineConfig
  states: PipelineConfig
  query_gradient: ChunkConfig
  key_gradient: ChunkConfig
  separate_values: bool
  chunk: int = CHUNK

  def __post_init__(self):
    if self.chunk not in (CHUNK, 2 * CHUNK):
      raise ValueError(f"chunk={self.chunk} must be 64 or 128: the rows of one WGMMA or of two.")

  def smem(self, shape: Shape) -> dict[str, int]:
    """Bytes of SMEM per CTA by kernel, for the variant of each that needs most."""
    C, K, V = self.chunk, shape.key_width, shape.value_width
    per_channel, per_token = shape.decay != "BTH", shape.decay == "BTHK"
    bf16, f32 = 2, 4
    pairs = bf16 * C * C
    # The split log decays of so many channels, and the signs of a span.
    decay = lambda width: bf16 * 2 * C * width + pairs + f32 * 2 * C if per_token else 0
    normalizer = f32 * K + bf16 * C * TILE_WIDTH if shape.normalize else 0
    needed = {}
    if per_channel:
      slots = min(self.scores.chunks_per_cta, 2)
      tiles = bf16 * (2 * slots + 1) * C * K + pairs + decay(K)
      extra = bf16 * C * TILE_WIDTH if per_token else f32 * 2 * C
      needed["scores"] = tiles + extra + f32 * (C + K) + _REDUCTIONS
    config = self.outputs
    stage = bf16 * C * (2 * K + config.value_tile) + pairs + f32 * C * shape.normalize
    kept = bf16 * config.value_tile * (K + C) + normalizer
    needed["outputs"] = config.num_stages * stage + kept
    config = self.states
    stage = bf16 * C * (K + config.value_tile) + bf16 * K * config.value_tile
    needed["states"] = config.num_stages * stage + normalizer
    if shape.normalize:
      needed["division_gradient"] = bf16 * 2 * C * V + _REDUCTIONS
    for name in ("query_gradient", "key_gradient"):
      config = getattr(self, name)
      makes_values = name == "key_gradient" and not self.separate_values
      if not per_channel:
        head = bf16 * (2 * C * V + K * V)
        shared = bf16 * 2 * C * K
        size = config.head_stages * head + shared + _REDUCTIONS
        if config.heads_per_cta > 1 and name == "key_gradient":
          size += bf16 * C * V - _REDUCTIONS  # dv of a head on its way; nothing crosses warps
      else:
        columns = V // config.value_parts
        block = bf16 * (2 * C + columns) * TILE_WIDTH
        size = bf16 * 2 * C * columns + config.blocks_per_cta * block + decay(TILE_WIDTH)
        size += pairs if makes_values else _REDUCTIONS
        size += bf16 * C * TILE_WIDTH if makes_values or V == TILE_WIDTH else 0
      needed[name] = size
    if per_channel and self.separate_values:
      needed["value_gradient"] = bf16 * (C * V + C * K + K * V) + pairs + _REDUCTIONS
    return {name: size + _BARRIERS for name, size in needed.items()}

  def check(self, shape: Shape) -> None:
    """Raises a ValueError where the configuration does not fit the shape or the device."""
    if self.chunk != CHUNK and (shape.decay != "BTH" or shape.length % self.chunk):
      raise ValueError(
        f"linear_attention: chunk={self.chunk} needs scalar decays and whole chunks, and there are "
        f"decays {shape.decay} of {shape.length} tokens; use {CHUNK}."
      )
    for name in ("outputs", "states"):
      tile = getattr(self, name).value_tile
      if shape.value_width % tile:
        raise ValueError(
          f"linear_attention: {name}.value_tile={tile} must divide V={shape.value_width}."
        )
    group = shape.heads // shape.groups
    for name in ("query_gradient", "key_gradient"):
      config = getattr(self, name)
      for field, whole in (
        ("heads_per_cta", group),
        ("blocks_per_cta", shape.blocks),
        ("value_parts", shape.value_width // TILE_WIDTH),
      ):
        number = getattr(config, field)
        if whole % number:
          raise ValueError(
            f"linear_attention: {name}.{field}={number} must divide {whole}, what there is of them."
          )
    whole = shape.decay == "HK" and self.key_gradient.blocks_per_cta == shape.blocks
    if not self.separate_values and not whole and shape.decay != "BTH":
      raise ValueError(
        "linear_attention: separate_values=False needs constant decays and "
        f"key_gradient.blocks_per_cta={shape.blocks}, all blocks of a chunk."
      )
    tuning.check_smem("linear_attention", self.smem(shape))


@dataclasses.dataclass(frozen=True)
class AmpereConfig:
  """The kernels for every GPU since Ampere: nothing is chosen yet.

  A CTA has one warpgroup, 64 key channels or 64 value columns, and tiles of 64 tokens: so little
  SMEM that one fits into the 99 KiB of an RTX GPU and two or three into that of an A100 or H100.
  """

  chunk: int = CHUNK  # tokens of a chunk

  def __post_init__(self):
    if self.chunk != CHUNK:
      raise ValueError(f"chunk={self.chunk} must be {CHUNK}, the rows of a warpgroup's products.")

  def smem(self, shape: Shape) -> dict[str, int]:
    """Bytes of SMEM per CTA by kernel, for the variant of each that needs most."""
    tile, K = 2 * self.chunk * TILE_WIDTH, shape.key_width
    columns = K // TILE_WIDTH  # tiles of a whole row of keys, or of a state's 64 columns
    decay = 3 * tile if shape.decay == "BTHK" else 0
    needed = {
      "scores": (2 if shape.decay == "BTH" else 4) * tile + decay + 4 * self.chunk,
      "outputs": (2 + 3 * columns) * tile,
      "states": (1 + 2 * columns) * tile,
      "query_key_gradients": 6 * tile + decay + 4 * TILE_WIDTH,
      "value_gradients": (2 + 2 * columns) * tile,
    }
    return {name: size + _REDUCTIONS for name, size in needed.items()}

  def check(self, shape: Shape) -> None:
    """Raises a ValueError where the kernels do not fit the device."""
    tuning.check_smem("linear_attention", self.smem(shape))


def _check_positive(config):
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if value < 1:
      raise ValueError(f"{field.name}={value} must be at least 1.")


def default(shape: Shape) -> Config:
  """The configuration for a shape on the current device."""
  pipeline = PipelineConfig(value_tile=min(shape.value_width, 128), num_stages=3)
  chunks = shape.batch * shape.heads * (shape.length // CHUNK)
  scores = ScoresConfig(1 if shape.decay == "BTHK" else chunks_per_cta(chunks))
  # All 256 columns of values would leave room for one CTA per SM.
  parts = max(shape.value_width // 128, 1)
  # Per-token decays or wider values leave no SMEM for two blocks of channels.
  joint = shape.decay == "HK" and shape.value_width <= 128
  by_query = by_key = ChunkConfig(
    blocks_per_cta=shape.blocks if joint else 1, value_parts=parts if shape.decay != "BTH" else 1
  )
  group = shape.heads // shape.groups
  heads = 1
  if shape.decay == "BTH" and group > 1 and not shape.normalize:
    # With a normalizer the key sums would need the registers that hold the sums.
    heads = heads_per_cta(group, chunks)
  if heads > 1:
    K, V = shape.key_width, shape.value_width
    by_query = ChunkConfig(heads_per_cta=heads, head_stages=head_stages(K, V, 2 * K))
    by_key = ChunkConfig(heads_per_cta=heads, head_stages=head_stages(K, V, 2 * K + V))
  config = Config(scores, pipeline, pipeline, by_query, by_key, separate_values=not joint)
  return tuning.tuned("linear_attention", shape.shape_class, config)


def padded_width(width: int, widths: tuple[int, ...]) -> int:
  """The first of `widths` that is at least `width`."""
  return next(size for size in widths if size >= width)


def preferred(key_width: int, value_width: int) -> bool:
  """Whether the chunked kernels are faster than XLA's form, where they can run.

  Measured on an H200 at B8 T2048 H16 K128 V128, where they are for every decay.
  """
  return min(key_width, value_width) >= NARROWEST


def num_splits(batch: int, heads: int, value_width: int, length: int) -> int:
  """The number of splits into which a sequence is cut so that every SM has work."""
  ctas = batch * heads * -(-value_width // 128)
  return device.current().num_splits(ctas, padded_length(length, 1), 4 * CHUNK)


def padded_length(length: int, num_splits: int, chunk: int = CHUNK) -> int:
  """The number of tokens that the kernels run: equally many whole chunks in every split."""
  block = chunk * num_splits
  return -(-length // block) * block


def chunks_per_cta(chunks: int) -> int:
  """Chunks that a CTA of the intra-chunk kernel processes, one after the other.

  More than one only if there remain three CTAs for each of the two that an SM holds.
  """
  enough = 3 * 2 * device.current().sm_count
  return next(n for n in (4, 2, 1) if n == 1 or chunks >= n * enough)


def heads_per_cta(group: int, ctas: int) -> int:
  """Heads of a group that a CTA of the backward pass processes, one after the other.

  It adds up their gradients of queries or keys, so `group / heads_per_cta` sums of a group remain.
  Of the divisors of `group`, the one that takes the least time on SMs that run two CTAs each, if a
  CTA takes the same time for each head, and once more to begin and to end.

  Args:
    group: heads that share queries and keys.
    ctas: CTAs if each had one head.
  """
  rounds = lambda n: -(-ctas // (n * 2 * device.current().sm_count))
  divisors = (n for n in range(group, 0, -1) if group % n == 0)
  return min(divisors, key=lambda n: rounds(n) * (n + 1))


def head_stages(key_width: int, value_width: int, columns: int) -> int:
  """Heads whose tiles are in the SMEM of a CTA with several: two if there is room in half an SM.

  Args:
    columns: of all tiles [C, X] together that are there once.
  """
  head = (key_width + 2 * CHUNK) * value_width
  reserved = 3 * 1024  # sums that cross warps, and barriers
  room = device.current().smem_of_each(2) - reserved
  return 2 if 2 * (2 * head + CHUNK * columns) <= room else 1
