"""ListOps: the value of a nested expression of lists, one digit.

    [MAX 2 9 [MIN 4 7 ] 0 ]      9

A node is a digit with probability 3/4, else an operator (MIN, MAX, MED, the median rounded down, or
SM, the sum modulo 10) with 2 to `max_args` nodes, down to `max_depth`; the whole expression has
more than `min_length` and less than `max_length` tokens. The model reads it from left to right, and
its answer is the token at the last bracket.

Source: Long Range Arena (Tay et al. 2021), section 2.2, and its generator, whose sets have 96,000
and twice 2,000 rows. Drawn with other random numbers; equal expressions are not removed.
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from experiments.limits import check_rows
from experiments.mqar import Examples

OPERATORS = (min, max, lambda x: int(np.median(x)), lambda x: sum(x) % 10)
DIGIT, OPERATOR, CLOSE = 1, 11, 15  # ids: of 0, of MIN, of the bracket; 0 fills rows
VOCABULARY = 16
_SPLIT = 0.25  # probability of an operator
_BLOCK = 2000  # expressions drawn at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListOps:
  """The settings of the task.

  Args:
    length: T, the tokens of a row, at least those of the longest expression.
    min_length, max_length: an expression has more and fewer tokens than these.
    max_depth: nodes from the whole expression down to the deepest digit.
    max_args: arguments of an operator, at most.

  Raises:
    ValueError: the lengths leave no room, or a number is too small.
  """

  name: ClassVar[str] = "listops"

  length: int = 2000
  min_length: int = 500
  max_length: int = 2000
  max_depth: int = 10
  max_args: int = 10

  def __post_init__(self):
    for name, least in (("max_depth", 2), ("max_args", 2), ("min_length", 1)):
      if getattr(self, name) < least:
        raise ValueError(f"{name}={getattr(self, name)} must be at least {least}.")
    if self.max_length < self.min_length + 10:
      raise ValueError(
        f"max_length={self.max_length} is less than 10 above min_length={self.min_length}: few"
        " expressions are so; use others."
      )
    if self.length < self.max_length - 1:
      raise ValueError(
        f"length={self.length} does not hold expressions of up to {self.max_length - 1} tokens; use"
        " seq_len of at least that, or a smaller --max-length."
      )

  def examples(self, rows: int, seed: int) -> Examples:
    """`rows` examples, the same for the same seed."""
    check_rows(rows, self.length)
    rng = np.random.default_rng(seed)
    tokens = np.zeros((rows, self.length), np.int32)
    positions, targets = (np.zeros((rows, 1), np.int32) for _ in range(2))
    row = 0
    while row < rows:
      for expression, value in self._block(rng):
        tokens[row, : len(expression)] = expression
        positions[row], targets[row] = len(expression) - 1, DIGIT + value
        row += 1
        if row == rows:
          break
    return Examples(tokens, positions, targets)

  def _block(self, rng: np.random.Generator) -> Iterator[tuple[list[int], int]]:
    """Expressions of the right length among `_BLOCK`, and their values.

    All nodes of one depth are drawn together, in the order of their parents, and only expressions
    that are kept are written out.
    """
    owner, levels = np.arange(_BLOCK), []
    total = np.zeros(_BLOCK, np.int64)
    for depth in range(1, self.max_depth + 1):
      splits = rng.random(len(owner)) < (_SPLIT if depth < self.max_depth else 0)
      args = np.where(splits, rng.integers(2, self.max_args + 1, len(owner)), 0)
      values = np.where(splits, rng.integers(0, 4, len(owner)), rng.integers(0, 10, len(owner)))
      levels.append((owner, args, values))
      total += np.bincount(owner, 1 + splits, _BLOCK).astype(np.int64)
      owner = np.repeat(owner, args)
    for kept in np.flatnonzero((total > self.min_length) & (total < self.max_length)):
      nodes = []
      for owner, args, values in levels:
        part = slice(*np.searchsorted(owner, [kept, kept + 1]))
        nodes.append(iter(zip(args[part].tolist(), values[part].tolist(), strict=True)))
      tokens: list[int] = []
      value = _write(nodes, 0, tokens)
      yield tokens, value


def _write(nodes, depth: int, tokens: list[int]) -> int:
  """Appends the next node of this depth with all below it; returns its value."""
  count, value = next(nodes[depth])
  if not count:
    tokens.append(DIGIT + value)
    return value
  tokens.append(OPERATOR + value)
  values = [_write(nodes, depth + 1, tokens) for _ in range(count)]
  tokens.append(CLOSE)
  return int(OPERATORS[value](values))
