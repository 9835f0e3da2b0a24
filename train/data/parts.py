"""Finished parts of a set that is being tokenized, which the next process need not encode again.

They are in a hidden folder next to the set, whose name has a digest of what the set is created
from. A part has the next documents of the set, and its name once it is complete.
"""

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lnssm_jax.files.reading import digest_of
from train.data.errors import DataError, writing
from train.data.indexed import IndexedDataset, IndexedWriter

TOKENS = 1 << 25  # of a part, which is in memory until it is complete

Entry = tuple[np.ndarray, np.ndarray | None]  # ids and weights of a document


class Parts:
  """The parts of the set `prefix` that is created from `origin`."""

  def __init__(self, prefix: Path, origin: dict[str, Any], dtype: np.dtype, *, weighted: bool):
    self._prefix, self._dtype, self._weighted = prefix, dtype, weighted
    self._folder = prefix.with_name(f".{prefix.name}.{digest_of(origin)[:16]}.parts")
    self._number, self._pending, self._tokens = 0, list[Entry](), 0

  def finished(self) -> Iterator[Entry]:
    """Yields the documents of the complete parts."""
    for number in itertools.count():
      self._number = number
      try:
        part = IndexedDataset(self._folder / f"{number:06}")
      except DataError:  # there is none, or it is damaged: it is written again
        return
      ends = np.append(part.document_starts, part.num_tokens)
      for start, end in itertools.pairwise(ends):
        weights = None if part.weights is None else part.weights[start:end]
        yield part.tokens[start:end], weights

  def add(self, ids: np.ndarray, weights: np.ndarray | None) -> None:
    """Adds the next document, and writes those of a part once they are enough."""
    self._pending.append((ids.astype(self._dtype), weights))
    self._tokens += len(ids)
    if self._tokens < TOKENS:
      return
    with writing(self._folder):
      self._folder.mkdir(exist_ok=True)
    prefix = self._folder / f"{self._number:06}"
    with IndexedWriter(prefix, self._dtype, weighted=self._weighted) as writer:
      for entry in self._pending:
        writer.add_document(*entry)
    self._number, self._pending, self._tokens = self._number + 1, [], 0

  def remove(self) -> None:
    """Removes the parts of the set, also those from another text or tokenizer."""
    for folder in self._prefix.parent.glob(f".{self._prefix.name}.*.parts"):
      shutil.rmtree(folder, ignore_errors=True)
