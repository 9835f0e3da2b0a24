"""Token files -> windows of a fixed length, or random crops -> shuffled batches.

A window is `seq_len` tokens and the targets, shifted by one. The stream of batches is a pure
function of (data, order, seed, global_batch, step), for a mixture of sets too: its position is the
step number, independent of the number of readers, so a run resumed at step n sees the batches it
would have seen.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import grain
import numpy as np

from train.data import packing
from train.data.errors import DataError
from train.data.indexed import IndexedDataset, check_ids, check_weights
from train.data.tokenize import check_length

Batch = dict[str, np.ndarray]
Prefixes = str | Path | Sequence[str | Path]

_ENDLESS = 1 << 48  # random crops of a run; more than one can read


class TokenWindows(grain.sources.RandomAccessDataSource):
  """Non-overlapping windows of one or more datasets, concatenated.

  Window i of a dataset starts at token i * seq_len. Its entries, each [seq_len]:

    tokens       int32    the inputs
    targets      int32    the token after each input
    segment_ids  int32    document of the input, counted from 0 in the window
    weights      float32  of the target in the pair (1 without `.weights`), or 0 where the target
                          is in the next document

  Tokens after the last full window of a dataset are dropped.

  Windows of a dataset that is `whole` have whole documents, as many as fit (`packing.best_fit`);
  the rest of a window is padding, a document of weight 0. So no prompt is cut from its completion,
  and no answer from the other one of its row, where a row has two documents. With a `reference`
  (`train.step.preference`), windows have its rows as one more entry.

  Args:
    prefixes: paths of the pairs, without `.bin` and `.idx`.
    seq_len: tokens per window.
    vocab_size: of the model; every id in the files must be smaller.
    boundaries: "reset", or "ignore": all of a window is one document, and every target counts.
      Documents of `whole` datasets are apart in any case.
    whole: the documents of each row of each dataset; 0: it is not whole.
    packed: whether a window of a `whole` dataset has several documents, or one.

  Raises:
    DataError: a pair is missing or damaged, has an id >= vocab_size (named with its position), is
      too short for one window, or is whole and has a document of more than seq_len + 1 tokens.
  """

  def __init__(
    self,
    prefixes: Prefixes,
    seq_len: int,
    vocab_size: int,
    boundaries: Literal["reset", "ignore"] = "reset",
    whole: Sequence[int] = (),
    packed: bool = True,
  ):
    if isinstance(prefixes, str | Path):
      prefixes = [prefixes]
    if not prefixes:
      raise DataError("no token files are named; use at least one set (data.train).")
    if seq_len < 1:
      raise DataError(f"seq_len={seq_len} must be at least 1.")
    if boundaries not in ("reset", "ignore"):
      raise DataError(f"boundaries={boundaries!r} must be 'reset' or 'ignore'.")
    self.seq_len, self.vocab_size, self._apart = seq_len, vocab_size, boundaries == "reset"
    self._datasets = [IndexedDataset(prefix) for prefix in prefixes]
    self._bounds = [np.append(data.document_starts, data.num_tokens) for data in self._datasets]
    self._whole = [int(x) for x in whole or [0] * len(prefixes)]
    self.reference: np.ndarray | None = None
    self._packs = [
      packing.rows(dataset.prefix, np.diff(bounds), seq_len, packed, documents)
      if documents
      else None
      for dataset, bounds, documents in zip(self._datasets, self._bounds, self._whole, strict=True)
    ]
    counts = []
    for dataset, pack in zip(self._datasets, self._packs, strict=True):
      if pack is None:
        check_length(dataset.prefix, dataset.num_tokens, seq_len + 1)
      dataset.check_tokens(vocab_size)
      dataset.check_targets()
      counts.append((dataset.num_tokens - 1) // seq_len if pack is None else len(pack))
    self._first = np.cumsum([0, *counts])  # [datasets + 1], index of each dataset's first window

  def __len__(self) -> int:
    return int(self._first[-1])

  def __getitem__(self, i: int) -> Batch:
    if not 0 <= i < len(self):
      raise IndexError(f"no window {i}; there are {len(self)}.")
    which = int(np.searchsorted(self._first, i, "right")) - 1
    return self.crop(which, (int(i) - int(self._first[which])) * self.seq_len)

  @property
  def has_pairs(self) -> bool:
    """Whether its rows are pairs of answers."""
    return 2 in self._whole

  @property
  def fingerprint(self) -> str:
    """Digest of the content of all windows: by the checksums of the files, if they have any."""
    digest = hashlib.sha256(repr((self.seq_len, self._whole, len(self))).encode())
    for dataset, bounds in zip(self._datasets, self._bounds, strict=True):
      arrays = [bounds, *(x.checksums for x in (dataset.tokens, dataset.weights) if x is not None)]
      for array in arrays:
        digest.update(np.ascontiguousarray(() if array is None else array).data)
    return digest.hexdigest()

  @property
  def places(self) -> list[int]:
    """For each dataset, the number of tokens where a window starts, or of all that windows hold."""
    pairs, T = zip(self._datasets, self._packs, strict=True), self.seq_len
    return [data.num_tokens - T if pack is None else len(pack) * T for data, pack in pairs]

  def crop(self, which: int, start: int) -> Batch:
    """The window that starts at a token of a dataset; that has it, if the dataset is whole."""
    dataset, T, pack = self._datasets[which], self.seq_len, self._packs[which]
    if pack is not None:
      bounds, number, documents = self._bounds[which], start // T, self._whole[which]
      members = (n * documents + i for n in pack[number] for i in range(documents))
      window = packing.window((self._document(dataset, *bounds[n : n + 2]) for n in members), T)
      if self.reference is not None:
        window["reference"] = self.reference[int(self._first[which]) + number]
      return window
    ids = dataset.tokens[start : start + T + 1]
    check_ids(ids, self.vocab_size, dataset.prefix + ".bin", start)
    starts = self._bounds[which][:-1] if self._apart else np.zeros(1, int)
    inside = slice(*np.searchsorted(starts, (start + 1, start + T + 1)))
    window = packing.cut(ids, starts[inside] - start)
    if dataset.weights is not None:
      window["weights"] *= _target_weights(dataset, start, T)
    return window

  def _document(self, dataset: IndexedDataset, start: int, end: int):
    """(ids, weights of all but the first)."""
    ids = dataset.tokens[start:end]
    check_ids(ids, self.vocab_size, dataset.prefix + ".bin", start)
    count = end - start - 1
    weighted = dataset.weights is not None
    return ids, _target_weights(dataset, start, count) if weighted else np.ones(count)

  def __repr__(self) -> str:
    prefixes = [dataset.prefix for dataset in self._datasets]
    return f"TokenWindows({prefixes}, seq_len={self.seq_len}, vocab_size={self.vocab_size})"


def _target_weights(dataset: IndexedDataset, start: int, count: int) -> np.ndarray:
  """float32 [count]: the weights of the tokens after `start`, checked."""
  weights = dataset.weights[start + 1 : start + count + 1]
  check_weights(weights, f"{dataset.prefix}.weights", start + 1)
  return weights


class Mixture:
  """Several sets, of which each gives a fixed share of the rows of the batches.

  Rows are numbered from 0, row r of step n (from 0) being row n * global_batch + r. Of the first i
  rows the first set gives

      floor(i w_1 / (w_1 + w_2 + ..) + u_1),   u_1 in [0, 1) from the seed,

  in integer arithmetic; of the other rows the second set gives its share in the same way, and so
  on. So the shares hold in any stretch of rows, up to a few, and the number of rows that a set has
  given is a function of the row's number. The k-th row of a set is the k-th of `train_batches` with
  that set alone, in an order of its own: with "windows" each occurs once in each epoch of the set.

  Args:
    sets: the windows of each set, by name.
    weights: of each set, by the same names; positive, of any sum.
  """

  def __init__(self, sets: Mapping[str, TokenWindows], weights: Mapping[str, float]):
    total = sum(weights.values())
    self.sets, self.shares = dict(sets), {name: weights[name] / total for name in sets}

  def epochs(self, rows: int) -> dict[str, float]:
    """How often each set has been read after so many rows."""
    return {name: rows * self.shares[name] / len(each) for name, each in self.sets.items()}


class _MixedRows(grain.sources.RandomAccessDataSource):
  """The endless rows of a `Mixture`."""

  def __init__(self, streams: Sequence[grain.MapDataset], shares: Sequence[float], seed: str):
    left = [sum(shares[i:]) for i in range(len(shares))]
    self._streams = streams
    self._shares = [round(2**32 * x / rest) for x, rest in zip(shares, left, strict=True)]
    digests = [hashlib.sha256(f"{seed} offset {i}".encode()).digest() for i in range(len(shares))]
    self._offsets = [int.from_bytes(digest[:4], "little") for digest in digests]

  def __len__(self) -> int:
    return _ENDLESS

  def __getitem__(self, i: int) -> Batch:
    i, last = int(i), len(self._streams) - 1
    for which, (share, offset) in enumerate(zip(self._shares, self._offsets, strict=True)):
      before, after = ((n * share + offset) >> 32 for n in (i, i + 1))
      if after > before or which == last:
        row = self._streams[which][before if which < last else i]
        assert row is not None  # Grain returns None for filtered items; there is no filter
        return row
      i -= before
    raise AssertionError("a mixture has at least one set")


class RandomCrops(grain.sources.RandomAccessDataSource):
  """Endless windows that start at any token, drawn uniformly and independently.

  Crop i is a function of (data, seed, i). Each token at which a whole window starts is as likely as
  any other, in whichever dataset; windows overlap, and none is certain to occur. A dataset of whole
  documents has its windows, each as likely as `seq_len` such tokens.

  Source: `get_batch` of nanoGPT, with which the language models of Longhorn were trained.
  """

  def __init__(self, windows: TokenWindows, seed: int):
    self.windows, self._key = windows, seed
    self._first = np.cumsum([0, *windows.places])  # index of each dataset's first place

  def __len__(self) -> int:
    return _ENDLESS

  def __getitem__(self, i: int) -> Batch:
    # One block of a counter-based generator per crop, whose bits NumPy keeps from version to
    # version, scaled to the places: biased by fewer than places / 2^64.
    bits = int(np.random.Philox(key=self._key, counter=int(i) << 64).random_raw())
    place = bits * int(self._first[-1]) >> 64
    which = int(np.searchsorted(self._first, place, "right")) - 1
    return self.windows.crop(which, place - int(self._first[which]))


class Documents(grain.sources.RandomAccessDataSource):
  """The documents of a dataset, one per row, for the mean of their mean losses.

  Entries as those of `TokenWindows`, each [length]. A document is cut to its first `length` tokens;
  of n tokens it predicts n - 1, each with weight 1 / (n - 1), or in proportion to the weights of
  the pair: its weights add up to 1, and the weighted mean over all rows is the mean over documents.
  Documents without a target are left out: those of one token, or with weights of 0 only.

  Args:
    prefix: path of the pair, without `.bin` and `.idx`.
    length: at least 2.
    vocab_size: of the model; every id in the files must be smaller.

  Attributes:
    num_predicted: number of predicted tokens of all documents, of a weight above 0.

  Raises:
    DataError: as `TokenWindows`.
  """

  def __init__(self, prefix: str | Path, length: int, vocab_size: int):
    if length < 2:
      raise DataError(f"length={length} must be at least 2: the first token predicts the second.")
    self._dataset, self._length = IndexedDataset(prefix), length
    self._dataset.check_tokens(vocab_size)
    self._vocab_size = vocab_size
    starts = self._dataset.document_starts
    sizes = np.minimum(np.diff(np.append(starts, self._dataset.num_tokens)), length)
    counts = sizes - 1
    if self._dataset.weights is not None:
      weights = self._dataset.weights[:]
      before = np.append(0, np.cumsum(weights > 0))  # [tokens + 1]
      counts = before[starts + sizes] - before[np.minimum(starts + 1, len(weights))]
    self._starts, self._sizes = starts[counts > 0], sizes[counts > 0]
    self.num_predicted = int(np.sum(counts[counts > 0]))

  def __len__(self) -> int:
    return len(self._starts)

  def __getitem__(self, i: int) -> Batch:
    start, count = int(self._starts[i]), int(self._sizes[i]) - 1
    ids = self._dataset.tokens[start : start + count + 1]
    check_ids(ids, self._vocab_size, self._dataset.prefix + ".bin", start)
    padded = lambda x, dtype: np.pad(x.astype(dtype), (0, self._length - count))
    weights = np.ones(count)
    if self._dataset.weights is not None:
      weights = _target_weights(self._dataset, start, count).astype(np.float64)
    return {
      "tokens": padded(ids[:-1], np.int32),
      "targets": padded(ids[1:], np.int32),
      # Padding is in pieces of the document's length: none exceeds a cache that the document fits.
      "segment_ids": np.arange(self._length, dtype=np.int32) // count,
      "weights": padded(weights / weights.sum(), np.float32),
    }


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
  source: TokenWindows | Mixture,
  *,
  seed: int,
  global_batch: int,
  order: Literal["windows", "random_crops"] = "windows",
  rows: range | None = None,
  start: int = 0,
  threads: int = 2,
  prefetch: int = 8,
) -> TrainBatches:
  """Shuffled batches, each entry [rows, seq_len], for steps start, start + 1, ...

  Args:
    seed: seed of the order.
    order: "windows": every window occurs once per epoch, in a new order each epoch; a batch may
      span two epochs. "random_crops": see `RandomCrops`.
    rows: rows of the global batch that this process reads; None means all. Their content does not
      depend on how rows are assigned to processes.
    threads: reading threads; 0 reads synchronously. Affects only speed.
    prefetch: batches read ahead.
  """
  for name, value, least in (("global_batch", global_batch, 1), ("start", start, 0)):
    if value < least:
      raise DataError(f"{name}={value} must be at least {least}.")
  if order not in ("windows", "random_crops"):
    raise DataError(f"order={order!r} must be 'windows' or 'random_crops'.")
  dataset = endless(source, str(seed), order)
  if rows is not None and len(rows) != global_batch:
    dataset = grain.MapDataset.source(_Rows(dataset, rows, global_batch))
    global_batch = len(rows)
  # There is no remainder; with False Grain's length overflows for global_batch=1.
  dataset = dataset.batch(global_batch, drop_remainder=True)
  return TrainBatches(dataset, start, grain.ReadOptions(threads, prefetch if threads else 0))


def endless(source: TokenWindows | Mixture, seed: str, order: str) -> grain.MapDataset:
  """The rows of all steps."""
  if isinstance(source, Mixture):
    streams = [endless(each, f"{seed} {name}", order) for name, each in source.sets.items()]
    return grain.MapDataset.source(_MixedRows(streams, list(source.shares.values()), seed))
  # Grain uses seed + epoch for each epoch: adjacent seeds would share all orders but one.
  mixed = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "little")
  if order == "windows":
    return grain.MapDataset.source(source).shuffle(seed=mixed).repeat()
  return grain.MapDataset.source(RandomCrops(source, mixed))


def eval_batches(
  source: TokenWindows | RandomCrops | Documents,
  batch: int,
  rows: range | None = None,
  count: int | None = None,
) -> Iterator[Batch]:
  """Every window, crop or document, once, in order; the last batch is padded with weight 0.

  With `count` only the first `count` of them.
  Entries are [batch, seq_len], with `rows` only these rows of every batch, [rows, seq_len].
  """
  if batch < 1:
    raise DataError(f"batch={batch} must be at least 1.")
  end = len(source) if count is None else min(count, len(source))
  for first in range(0, end, batch):
    numbers = range(batch) if rows is None else rows
    windows = [source[first + i] for i in numbers if first + i < end]
    empty = {key: np.zeros_like(value) for key, value in source[first].items()}
    windows += [empty] * (len(numbers) - len(windows))
    yield {key: np.stack([window[key] for window in windows]) for key in windows[0]}
