"""Token files -> windows of a fixed length -> shuffled batches.

A window is `seq_len` tokens and the targets, shifted by one. The stream of batches is a pure
function of (data, seed, global_batch, step): its position is the step number, independent of the
number of readers, so a run resumed at step n sees the batches it would have seen.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import grain
import numpy as np

from train.data.errors import DataError
from train.data.indexed import IndexedDataset, check_ids

Batch = dict[str, np.ndarray]


class TokenWindows(grain.sources.RandomAccessDataSource):
  """Non-overlapping windows of one or more datasets, concatenated.

  Window i of a dataset starts at token i * seq_len. Its entries, each [seq_len]:

    tokens       int32    the inputs
    targets      int32    the token after each input
    segment_ids  int32    document of the input, counted from 0 in the window
    weights      float32  1, or 0 where the target is in the next document

  Tokens after the last full window of a dataset are dropped.

  Args:
    prefixes: paths of the pairs, without `.bin` and `.idx`.
    seq_len: tokens per window.
    vocab_size: of the model; every id in the files must be smaller.

  Raises:
    DataError: a pair is missing or damaged, has an id >= vocab_size (named with its position), or
      is too short for one window.
  """

  def __init__(self, prefixes: str | Path | Sequence[str | Path], seq_len: int, vocab_size: int):
    if isinstance(prefixes, str | Path):
      prefixes = [prefixes]
    if not prefixes:
      raise DataError("no token files are named; use at least one set (data.train).")
    if seq_len < 1:
      raise DataError(f"seq_len={seq_len} must be at least 1.")
    self.seq_len, self.vocab_size = seq_len, vocab_size
    self._datasets = [IndexedDataset(prefix) for prefix in prefixes]
    self._starts = [dataset.document_starts for dataset in self._datasets]
    counts = []
    for dataset in self._datasets:
      count = (dataset.num_tokens - 1) // seq_len
      if count < 1:
        raise DataError(
          f"{dataset.prefix}.bin has {dataset.num_tokens} tokens, but one window of"
          f" seq_len={seq_len} needs {seq_len + 1}; use seq_len={max(dataset.num_tokens - 1, 1)} or"
          " less, or more text."
        )
      dataset.check_tokens(vocab_size)
      counts.append(count)
    self._first = np.cumsum([0, *counts])  # [datasets + 1], index of each dataset's first window

  def __len__(self) -> int:
    return int(self._first[-1])

  def __getitem__(self, i: int) -> Batch:
    if not 0 <= i < len(self):
      raise IndexError(f"no window {i}; there are {len(self)}.")
    which = int(np.searchsorted(self._first, i, "right")) - 1
    dataset, T = self._datasets[which], self.seq_len
    start = (int(i) - int(self._first[which])) * T
    ids = dataset.tokens[start : start + T + 1]
    check_ids(ids, self.vocab_size, dataset.prefix + ".bin", start)
    ids = ids.astype(np.int32)
    starts = self._starts[which]
    inside = slice(*np.searchsorted(starts, (start + 1, start + T + 1)))
    document = np.zeros(T + 1, np.int32)
    document[starts[inside] - start] = 1
    document = np.cumsum(document, dtype=np.int32)
    return {
      "tokens": ids[:-1],
      "targets": ids[1:],
      "segment_ids": document[:-1],
      "weights": (document[:-1] == document[1:]).astype(np.float32),
    }

  def __repr__(self) -> str:
    prefixes = [dataset.prefix for dataset in self._datasets]
    return f"TokenWindows({prefixes}, seq_len={self.seq_len}, vocab_size={self.vocab_size})"


class TrainBatches:
  """Infinite stream of training batches starting at a given step; see `train_batches`.

  Attributes:
    step: step of the next batch; the entire state of the stream.
  """

  def __init__(self, dataset: grain.MapDataset, start: int, options: grain.ReadOptions):
    self._inner = iter(dataset.to_iter_dataset(options))
    self._inner.set_state({"next_index": start})
    self.step = start

  def __iter__(self) -> "TrainBatches":
    return self

  def __next__(self) -> Batch:
    batch = next(self._inner)
    self.step += 1
    return batch

  def close(self) -> None:
    """Stops the reading threads; the stream cannot be read afterwards."""
    self._inner.close()

  def __enter__(self) -> "TrainBatches":
    return self

  def __exit__(self, *_) -> None:
    self.close()


class _Rows(grain.sources.RandomAccessDataSource):
  """Selected rows of every batch of an infinite dataset, concatenated."""

  def __init__(self, dataset: grain.MapDataset, rows: range, global_batch: int):
    self._dataset, self._rows, self._global_batch = dataset, rows, global_batch

  def __len__(self) -> int:
    return len(self._dataset) // self._global_batch * len(self._rows)

  def __getitem__(self, i: int) -> Batch:
    batch, row = divmod(int(i), len(self._rows))
    window = self._dataset[batch * self._global_batch + self._rows[row]]
    assert window is not None  # Grain returns None for filtered items; there is no filter
    return window


def train_batches(
  source: TokenWindows,
  *,
  seed: int,
  global_batch: int,
  rows: range | None = None,
  start: int = 0,
  threads: int = 2,
  prefetch: int = 8,
) -> TrainBatches:
  """Shuffled batches, each entry [rows, seq_len], for steps start, start + 1, ...

  Every window occurs once per epoch, in a new order each epoch; a batch may span two epochs.

  Args:
    seed: seed of the order.
    rows: rows of the global batch that this process reads; None means all. Their content does not
      depend on how rows are assigned to processes.
    threads: reading threads; 0 reads synchronously. Affects only speed.
    prefetch: batches read ahead.
  """
  for name, value, least in (("global_batch", global_batch, 1), ("start", start, 0)):
    if value < least:
      raise DataError(f"{name}={value} must be at least {least}.")
  # Grain uses seed + epoch for each epoch: adjacent seeds would share all orders but one.
  mixed = int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:4], "little")
  dataset = grain.MapDataset.source(source).shuffle(seed=mixed).repeat()
  if rows is not None and len(rows) != global_batch:
    dataset = grain.MapDataset.source(_Rows(dataset, rows, global_batch))
    global_batch = len(rows)
  # There is no remainder; with False Grain's length overflows for global_batch=1.
  dataset = dataset.batch(global_batch, drop_remainder=True)
  return TrainBatches(dataset, start, grain.ReadOptions(threads, prefetch if threads else 0))


def eval_batches(source: TokenWindows, batch: int, rows: range | None = None) -> Iterator[Batch]:
  """Every window once, in order, each entry [batch, seq_len]; the last is padded with weight 0.

  With `rows`, only these rows of every batch, [rows, seq_len].
  """
  if batch < 1:
    raise DataError(f"batch={batch} must be at least 1.")
  for first in range(0, len(source), batch):
    numbers = range(batch) if rows is None else rows
    windows = [source[first + i] for i in numbers if first + i < len(source)]
    empty = {key: np.zeros_like(value) for key, value in source[first].items()}
    windows += [empty] * (len(numbers) - len(windows))
    yield {key: np.stack([window[key] for window in windows]) for key in windows[0]}
