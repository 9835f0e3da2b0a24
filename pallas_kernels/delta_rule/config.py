"""Configurations of the delta rule's kernels. Never keyed on a length."""

import dataclasses
from typing import NamedTuple

from pallas_kernels.core import device, tuning
from pallas_kernels.core.wgmma import TILE_WIDTH

KEY_WIDTHS = (64, 128, 192, 256)  # what q and k are padded to
VALUE_WIDTHS = (64, 128)  # what v is padded to
WIDEST_WRITE_KEY = 64  # what a chunk needs of wider ones would not fit the SMEM
CHUNK = 64  # tokens, unless a configuration says otherwise
NARROWEST = 32  # narrower heads are padded more than twofold
_REDUCTIONS = 2048  # bytes of SMEM for sums that cross warps
REDUCTIONS = 1024  # of sums over the rows of a tile
_BARRIERS = 1024  # bytes of SMEM, at most, for barriers
NUM_ROWS = 5  # of a chunk's table


class Shape(NamedTuple):
  """Padded sizes, for which a configuration is chosen."""

  heads: int  # of all splits of all sequences together
  key_width: int
  value_width: int
  separate_erase_key: bool  # whether the erase key is one more input
  channels: bool = False  # whether each key channel has a decay
  write_key: bool = False  # whether values are stored under another key

  @property
  def shape_class(self) -> str:
    """The key of a device's table."""
    erase = "-channels" if self.channels else "-erase" if self.separate_erase_key else ""
    flags = erase + "-write" * self.write_key + ("" if self.many_heads else "-few")
    return f"K{self.key_width}-V{self.value_width}-bfloat16{flags}"

  @property
  def many_heads(self) -> bool:
    """Whether a CTA per head fills more than half of the device."""
    return self.heads > device.current().sm_count // 2


@dataclasses.dataclass(frozen=True)
class RecurrenceConfig:
  """How the recurrence along the chunks runs.

  Attributes:
    value_tile: value columns per CTA, which has a consumer warpgroup for every 64 of them.
    num_stages: chunks whose inputs are in SMEM.
    consumer_registers: per thread of a consumer.
    epilogue_registers: per thread of the epilogue.
    producer_registers: per thread of the producer.
  """

  value_tile: int
  num_stages: int
  consumer_registers: int
  epilogue_registers: int
  producer_registers: int = 24

  def __post_init__(self):
    if self.value_tile not in (TILE_WIDTH, 2 * TILE_WIDTH):
      raise ValueError(f"value_tile={self.value_tile} must be 64 or 128: a warpgroup has 64.")
    if self.num_stages < 1:
      raise ValueError(f"num_stages={self.num_stages} must be at least 1.")


@dataclasses.dataclass(frozen=True)
class Config:
  """All kernels of the delta rule over many tokens for Hopper.

  The kernels of chunk systems, and of the gradients of queries, keys and values, have one CTA per
  chunk and nothing else to choose.

  Attributes:
    forward: the recurrence with the outputs.
    reverse: the recurrence of the cotangents.
    maps: what splits of a sequence make of the states that enter them.
    chunk: tokens of a chunk.
  """

  forward: RecurrenceConfig
  reverse: RecurrenceConfig
  maps: RecurrenceConfig
  chunk: int = CHUNK

  def __post_init__(self):
    if self.chunk != CHUNK:
      raise ValueError(f"chunk={self.chunk} must be {CHUNK}: the rows of one WGMMA.")

  def smem(self, shape: Shape) -> dict[str, int]:
    """Bytes of SMEM per CTA by kernel, for the variant of each that needs most."""
    C, K, V = self.chunk, shape.key_width, shape.value_width
    keys = 2 + shape.separate_erase_key
    bf16, f32 = 2, 4
    pairs, table = bf16 * C * C, f32 * (C + K if shape.channels else NUM_ROWS * C)
    needed = {}
    for name, config in (("forward", self.forward), ("reverse", self.reverse)):
      tile = bf16 * C * config.value_tile
      stage = bf16 * keys * C * K + pairs + tile + table + 4 * C
      if shape.channels or name == "reverse":  # scores
        stage += pairs
      more = tile if name == "forward" or shape.write_key else 0  # outputs
      if shape.write_key:  # with its scores and what it adds to the systems
        stage += bf16 * C * K + 2 * pairs
      handed = bf16 * K * config.value_tile + tile + more
      needed[name] = config.num_stages * stage + handed
    stage = bf16 * (keys - 1) * C * K + pairs + bf16 * C * self.maps.value_tile + table
    if shape.write_key:
      stage += bf16 * C * K + pairs
    needed["split_maps_forward"] = self.maps.num_stages * stage
    # Keys, the cotangent of outputs, x and y, a block of a state, pairs of tokens.
    of_keys = keys * C * (TILE_WIDTH if shape.channels else K)
    needed["gradients"] = bf16 * (of_keys + 3 * C * V + TILE_WIDTH * V) + 2 * pairs
    if shape.channels:  # signs in place of dL, and tiles where those of values are too few
      more = max(0, 4 - (2 + shape.write_key) * V // TILE_WIDTH)
      needed["gradients"] += pairs * more + 2 * f32 * C
      if shape.write_key:  # its block, values, pairs of tokens
        keys += 1
        needed["gradients"] += bf16 * (C * TILE_WIDTH + C * V) + pairs
      # Keys, the right operand; scores, ones and, of a write key, two more; blocks of the inverse.
      chunks = bf16 * (keys + 1) * C * K + pairs * (2 + 2 * shape.write_key)
      # Halves of log decays, signs, their maximum; or tiles of the inverse.
      chunks += max(bf16 * 2 * C * K + pairs + 1024, 7 * pairs // 2)
      needed["chunks"] = chunks + f32 * (C * C // 4 + K) + _REDUCTIONS
      needed["gradients"] += REDUCTIONS
    return {name: size + _BARRIERS for name, size in needed.items()}

  def check(self, shape: Shape) -> None:
    """Raises a ValueError where the configuration does not fit the shape or the device."""
    tuning.check_smem("delta_rule", self.smem(shape))


@dataclasses.dataclass(frozen=True)
class AmpereConfig:
  """The kernels for every GPU since Ampere: nothing is chosen yet.

  A CTA has one warpgroup and 64 columns of values. Scores and gradients are linear attention's.
  """

  chunk: int = CHUNK  # tokens of a chunk

  def smem(self, shape: Shape) -> dict[str, int]:
    """Bytes of SMEM per CTA by kernel, for the variant of each that needs most."""
    tile, columns = 2 * self.chunk * TILE_WIDTH, shape.key_width // TILE_WIDTH
    keys = 2 + shape.separate_erase_key + shape.write_key
    tiles = 6 if shape.write_key else 3  # of values, and of pairs of tokens
    needed = {
      "recurrence": (tiles + (keys + 1) * columns) * tile,
      "inverses": 5 * tile + 4 * 16 * 64,
    }
    return {name: size + _REDUCTIONS for name, size in needed.items()}

  def check(self, shape: Shape) -> None:
    """Raises a ValueError where the kernels do not fit the device."""
    tuning.check_smem("delta_rule", self.smem(shape))


def default(shape: Shape) -> Config:
  """The configuration for a shape on the current device.

  Many heads: all columns of a head in one CTA, so that keys are loaded once. Few: more CTAs.
  """
  two = 2 * TILE_WIDTH
  narrow = shape.key_width <= two  # registers hold such a state in every one of two consumers
  wide = narrow and shape.value_width == two and shape.many_heads and not shape.write_key

  def recurrence(kernel, wide):
    """With as many stages as the SMEM holds."""
    tile, registers = (two, (168, 152)) if wide else (TILE_WIDTH, (232 if narrow else 248, 232))
    for num_stages in (4, 3, 2, 1):
      config = RecurrenceConfig(tile, num_stages, *registers)
      if Config(config, config, config).smem(shape)[kernel] <= device.current().smem:
        break
    return config

  columns_of_maps = shape.key_width + shape.value_width
  config = Config(
    forward=recurrence("forward", wide),
    reverse=recurrence("reverse", wide),
    maps=recurrence("split_maps_forward", narrow and columns_of_maps % two == 0),
  )
  return tuning.tuned("delta_rule", shape.shape_class, config)


def num_splits(heads: int, value_width: int, length: int) -> int:
  """Into how many splits a sequence is cut, of `heads` in all sequences together.

  Fewer than eight would not pay for the pass that computes what splits make of entering states.
  """
  ctas = heads * (value_width // TILE_WIDTH)
  splits = device.current().num_splits(ctas, length, 8 * CHUNK)
  return splits if splits >= 8 else 1


def preferred(key_width: int, value_width: int) -> bool:
  """Whether the chunked kernels are faster than XLA's form, where they can run."""
  return min(key_width, value_width) >= NARROWEST
