"""Windows of a fixed length: cut from a stream, or of whole documents, each with its own state."""

import bisect
from collections.abc import Iterable, Sequence

import numpy as np

from train.data.errors import DataError


def rows(
  prefix: str, sizes: np.ndarray, seq_len: int, packed: bool, documents: int = 1
) -> list[list[int]]:
  """The numbers of the rows of each window; those without a token after another are left out.

  Args:
    sizes: tokens of each document.
    packed: whether several rows may share a window.
    documents: of each row.

  Raises:
    DataError: a row does not fit, there is none, or a part of one.
  """
  if len(sizes) % documents:
    raise DataError(
      f"{prefix}.bin has {len(sizes):,} documents, but rows of {documents} each (data.fields); use"
      " token files that were made with these fields."
    )
  if documents > 1 and (empty := np.flatnonzero(np.asarray(sizes) == 0)).size:
    raise DataError(
      f"{prefix}.bin: row {empty[0] // documents + 1:,} has an answer without tokens"
      f" ({empty.size:,} in all); leave such rows out."
    )
  targets = (np.asarray(sizes) - 1).reshape(-1, documents).sum(1)
  longest = int(targets.max(initial=0))
  if longest <= 0:
    raise DataError(f"{prefix}.bin has no row of two tokens; use rows of a prompt and its answer.")
  if longest > seq_len:
    most = seq_len + documents
    plus = {1: "", 2: ", both answers together"}[documents]
    raise DataError(
      f"{prefix}.bin: {int(np.sum(targets > seq_len)):,} of {len(targets):,} rows have more than"
      f" seq_len + {documents} = {most:,} tokens{plus}, the longest {longest + documents:,}, and"
      f" rows are not cut; use seq_len={longest} or more, or leave them out."
    )
  numbers = np.flatnonzero(targets > 0)
  if not packed:
    return [[int(number)] for number in numbers]
  windows = best_fit(targets[numbers].tolist(), seq_len)
  return [[int(numbers[member]) for member in members] for members in windows]


def best_fit(sizes: Sequence[int], room: int) -> list[list[int]]:
  """The numbers of the members of each window, none of which is larger than `room`.

  The largest come first, each into the fullest window that has room for it.
  """
  members: list[list[int]] = []
  rooms: list[tuple[int, int]] = []  # of each window, ascending, with its number
  for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
    place = bisect.bisect_left(rooms, (sizes[number], -1))
    left, window = rooms.pop(place) if place < len(rooms) else (room, len(members))
    if window == len(members):
      members.append([])
    members[window].append(number)
    bisect.insort(rooms, (left - sizes[number], window))
  return members


def cut(ids: np.ndarray, starts: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
  """A window as of `TokenWindows`, each entry [T], from ids [T + 1].

  Args:
    starts: places from 1 to T in `ids` where a document begins.
  """
  ids, document = ids.astype(np.int32), np.zeros(len(ids), np.int32)
  document[np.asarray(starts, int)] = 1
  document = np.cumsum(document, dtype=np.int32)
  weights = (document[:-1] == document[1:]).astype(np.float32)
  names = ("tokens", "targets", "segment_ids", "weights")
  return dict(zip(names, (ids[:-1], ids[1:], document[:-1], weights), strict=True))


def window(
  documents: Iterable[tuple[np.ndarray, np.ndarray]], length: int
) -> dict[str, np.ndarray]:
  """A window as of `TokenWindows`, each entry [length], of whole documents and padding.

  Args:
    documents: of each the ids [n + 1] and the weights [n] of all but the first; the numbers n add
      up to at most `length`. The rest is a document of its own, of weight 0.
  """
  names = ("tokens", "targets", "segment_ids")
  found = {name: np.zeros(length, np.int32) for name in names}
  found["weights"] = np.zeros(length, np.float32)
  first = number = 0
  for number, (ids, weights) in enumerate(documents, 1):
    here = slice(first, first + len(weights))
    found["tokens"][here], found["targets"][here] = ids[:-1], ids[1:]
    found["weights"][here], found["segment_ids"][here] = weights, number - 1
    first = here.stop
  found["segment_ids"][first:] = number
  return found
