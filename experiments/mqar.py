"""Multi-query associative recall: which value stood behind this key?

A row of T tokens begins with n pairs, k_1 v_1 ... k_n v_n. Later each key returns once, and the
answer at its place is its value:

    keys    n different ids of [1, V / 2),       values   n different ids of [V / 2, V)
    query of pair j at position 2 n + 2 g_j,     g   n different gaps of [0, (T - 2 n) / 2)

Gaps are drawn one after the other without replacement, gap i with a probability in proportion to
(i + 1)^(a - 1): most queries follow soon. All other positions hold 0, or random ids.

Source: Zoology (Arora et al. 2023), section 3 and appendix C, and its published settings, with
which the DSF, Longhorn, SSE and LCSM papers compare mixers. Drawn with other random numbers.
"""

import dataclasses
import functools
from typing import ClassVar, NamedTuple

import numpy as np

from experiments.limits import check_rows

IGNORED = -100  # the label of a position without an answer
_BLOCK = 1000  # rows drawn at once: bounds the memory


class Examples(NamedTuple):
  """Rows of a task whose answers stand at n positions each. int32."""

  tokens: np.ndarray  # [B, T]
  positions: np.ndarray  # [B, n], where an answer is asked for
  targets: np.ndarray  # [B, n], the answers

  def labels(self) -> np.ndarray:
    """[B, T] int32: the answer at its position, elsewhere `IGNORED`."""
    labels = np.full_like(self.tokens, IGNORED)
    np.put_along_axis(labels, self.positions, self.targets, axis=1)
    return labels


@dataclasses.dataclass(frozen=True, kw_only=True)
class MQAR:
  """The settings of the task.

  Args:
    length: T, even.
    pairs: n.
    vocab_size: V, above T.
    power: a, from 0 to 10; smaller values bring queries closer.
    random_fillers: whether positions without a meaning hold ids of the whole vocabulary, not 0.

  Raises:
    ValueError: T is odd, 4 n > T, V <= T, or a number is too small.
  """

  name: ClassVar[str] = "mqar"

  length: int = 256
  pairs: int = 16
  vocab_size: int = 8192
  power: float = 0.01
  random_fillers: bool = False

  def __post_init__(self):
    if self.pairs < 1:
      raise ValueError(f"pairs={self.pairs} must be at least 1.")
    if self.length % 2 or self.length < 4 * self.pairs:
      raise ValueError(
        f"length={self.length} must be even and at least 4 pairs={4 * self.pairs}, which pairs and"
        f" queries need. Use length={max(4 * self.pairs, self.length + self.length % 2)}."
      )
    if self.vocab_size <= self.length:
      raise ValueError(
        f"vocab_size={self.vocab_size} must be above length={self.length}; use 8192."
      )
    if not 0 <= self.power <= 10:  # powers of thousands of tokens overflow later
      raise ValueError(f"power={self.power} must be from 0 to 10, such as 0.01.")

  def examples(self, rows: int, seed: int) -> Examples:
    """`rows` examples, the same for the same seed; drawn once by the groups of a sweep."""
    check_rows(rows, self.length)
    return _drawn(self, rows, seed)

  def draw(self, rows: int, seed: int) -> Examples:
    rng = np.random.default_rng(seed)
    sizes = [min(_BLOCK, rows - first) for first in range(0, rows, _BLOCK)]
    blocks = [self._block(rng, size) for size in sizes]
    return Examples(*(np.concatenate(arrays) for arrays in zip(*blocks, strict=True)))

  def _block(self, rng, rows):
    n, T, V = self.pairs, self.length, self.vocab_size
    keys = 1 + _distinct(rng, rows, V // 2 - 1, n)
    values = V // 2 + _distinct(rng, rows, V - V // 2, n)
    chance = np.arange(1, (T - 2 * n) // 2 + 1) ** (self.power - 1.0)
    positions = 2 * n + 2 * _distinct(rng, rows, len(chance), n, chance)
    tokens = np.zeros((rows, T), np.int32)
    tokens[:, : 2 * n : 2], tokens[:, 1 : 2 * n : 2] = keys, values
    np.put_along_axis(tokens, positions, keys, axis=1)
    if self.random_fillers:
      tokens = np.where(tokens == 0, rng.integers(0, V, tokens.shape, np.int32), tokens)
    return Examples(tokens, positions, values)


@functools.lru_cache(maxsize=6)  # three sets of rows of two lengths
def _drawn(task: MQAR, rows: int, seed: int) -> Examples:
  return task.draw(rows, seed)


def _distinct(rng, rows, choices, n, weights=None):
  """[rows, n] int32 below `choices`, different in a row, drawn in turn by weight.

  The n smallest of independent exponential waiting times with these rates, in their order.
  """
  times = rng.standard_exponential((rows, choices), np.float32)
  if weights is not None:
    times /= weights
  first = np.argpartition(times, n - 1, axis=1)[:, :n]
  order = np.take_along_axis(times, first, axis=1).argsort(axis=1)
  return np.take_along_axis(first, order, axis=1).astype(np.int32)
