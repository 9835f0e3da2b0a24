"""Training text that is encoded while a run reads it: no token files, no copy.

A source is one of

    text            as in `train.data.sources`: .jsonl, .parquet, folders, globs
    MODULE:FUNCTION of one's own. What the function returns has documents, which are texts or rows
                    with the text under the key of `data.fields`:
                      a dataset with `len` and rows by number, such as a `datasets.Dataset`: read in
                      a new random order in each epoch;
                      an iterable, such as a generator or a `datasets.IterableDataset`: read in its
                      order, again from its start when it ends.

Tokens of all documents form one stream, which is cut into windows as token files are. The position
is three integers: the epoch, a document in it, and a token of that. To resume there,

    a dataset             is asked for that document: exact, at once
    FUNCTION(start=n)     a function with this argument is called with the number of the document
    `.skip(n)`            an iterable that has it is asked to skip the documents before
    any other             is read again up to there, without encoding: exact if it gives the same
                          documents in the same order again, which nobody checks

A run of several processes reads the whole stream in each of them, which keeps its rows.
"""

import contextlib
import inspect
import itertools
import queue
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, Literal, NoReturn

import grain
import numpy as np

from lnssm_jax.pretrained.special_tokens import InText
from train.config import functions
from train.data import packing, sources
from train.data.encoding import encode, grouped
from train.data.errors import DataError
from train.data.indexed import check_ids
from train.data.sources import Document
from train.data.tokenizers import Tokenizer
from train.data.windows import endless

_GROUP = 1 << 16  # characters encoded at once
_MOST_EMPTY = 1_000_000  # documents in a row
_LOOK = 0.2  # seconds between two looks whether the run ends
_BEGINNING = {"epoch": 0, "document": 0, "token": 0}


class SourceError(DataError):
  """A function of a source cannot be used, or raised."""

  def __init__(self, message: str, exit_code: int):
    super().__init__(message)
    self.exit_code = exit_code  # of the command line


class Stream(grain.IterDataset):
  """Endless windows of `train.data.windows.TokenWindows` from a source; the module says which.

  The iterator's state is the position of the next window.

  Args:
    boundaries: as of `TokenWindows`.
    key: of the text in a row.
    seed: of the order of a dataset.

  Attributes:
    apart: whether documents are.

  Raises:
    DataError: the function cannot be imported or called; while reading, the function raises, a
      document is no text, or an epoch, or 1,000,000 documents in a row, have none.
  """

  def __init__(
    self,
    source: str,
    tokenizer: Tokenizer,
    seq_len: int,
    vocab_size: int,
    boundaries: Literal["reset", "ignore"] = "reset",
    *,
    key: str = "text",
    seed: int = 0,
    special_tokens: InText = "text",
  ):
    super().__init__()
    self.source, self.seq_len = source, seq_len
    self._documents = opened(source, seed, key)
    self._tokenizer, self._vocab_size, self._special = tokenizer, vocab_size, special_tokens
    self._key, self.apart = key, boundaries == "reset"

  def __iter__(self) -> "_Windows":
    return _Windows(self)

  def tokens(self, epoch: int, document: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """(epoch, number of the document in it, its tokens) from a document on, without end."""
    while True:
      any_tokens = document > 0
      for group in grouped(self._texts(epoch, document), lambda text: len(text[1]), _GROUP):
        encoded = encode((Document(text) for _, text in group), self._tokenizer, self._special)
        for (number, _), row in zip(group, encoded, strict=True):
          where = f"{self.source}, document {number}"
          check_ids(row.ids, self._vocab_size, where, 0)
          any_tokens |= len(row.ids) > 0
          yield epoch, number, row.ids
      if not any_tokens:
        again = f" when it is read again (epoch {epoch}); return a new iterable in each call"
        raise DataError(f"{self.source} has no text{again if epoch else ''}.")
      epoch, document = epoch + 1, 0

  def _texts(self, epoch: int, document: int) -> Iterator[tuple[int, str]]:
    """(number, text) of the documents of an epoch that are not empty."""
    last = document
    for number, row in _numbered(self.source, self._documents, epoch, document):
      if text := self._text(number, row):
        last = number
        yield number, text
      elif number - last >= _MOST_EMPTY:
        raise DataError(
          f"{self.source}: {_MOST_EMPTY:,} documents from {last} on are empty; leave them out."
        )

  def _text(self, number: int, row: Any) -> str:
    row = row.text if isinstance(row, Document) else row
    if isinstance(row, str):
      row = {self._key: row}
    return sources.text_in(row, f"{self.source}, document {number}", self._key)


class _Windows(grain.DatasetIterator):
  """Iterator of a `Stream`."""

  def __init__(self, stream: Stream):
    super().__init__()
    self._stream = stream
    self.set_state(_BEGINNING)

  def get_state(self) -> dict[str, int]:
    return dict(self._state)

  def set_state(self, state: dict[str, int]) -> None:
    """Continues at a position that `get_state` has returned."""
    self._state = {name: int(state[name]) for name in _BEGINNING}
    self._next = self._stream.tokens(self._state["epoch"], self._state["document"])
    self._parts: list[tuple[int, int, int, np.ndarray]] = []  # epoch, document, first token, tokens
    self._skip = self._state["token"]

  def __next__(self) -> dict[str, np.ndarray]:
    T = self._stream.seq_len
    while sum(len(ids) for *_, ids in self._parts) < T + 1:
      epoch, document, ids = next(self._next)
      self._parts.append((epoch, document, self._skip, ids[self._skip :]))
      self._skip = 0
    parts = [ids for *_, ids in self._parts]
    starts = np.cumsum([len(ids) for ids in parts])[:-1]
    window = packing.cut(
      np.concatenate(parts)[: T + 1], starts[starts <= T] if self._stream.apart else []
    )
    left = T  # the last token of a window is the first of the next
    while left >= len(self._parts[0][-1]):
      left -= len(self._parts.pop(0)[-1])
    epoch, document, first, ids = self._parts[0]
    self._parts[0] = epoch, document, first + left, ids[left:]
    self._state = {"epoch": epoch, "document": document, "token": first + left}
    return window


class StreamBatches:
  """Batches of a `Stream`, each entry [rows, seq_len], as `train.data.windows.TrainBatches`.

  A source may wait for a network, so nothing waits for it when the run ends.

  Args:
    rows: of the global batch that this process keeps; None: all.
    state: where to continue; None: at the beginning.
    prefetch: batches read ahead, by a thread.
    stop: if it is true while a batch is awaited, there is none.

  Attributes:
    state: the position of the next batch.
  """

  def __init__(
    self,
    stream: Stream,
    global_batch: int,
    rows: range | None = None,
    state: dict[str, int] | None = None,
    prefetch: int = 8,
    stop: Callable[[], object] = lambda: False,
  ):
    self._inner, self._rows = iter(stream.batch(global_batch, drop_remainder=True)), rows
    if state is not None:
      self._inner.set_state(state)
    self.state, self._stop = self._inner.get_state(), stop
    self._ahead: queue.Queue[Any] = queue.Queue(prefetch)  # (batch, state), or an error
    self._closed = threading.Event()
    threading.Thread(target=self._read, name="stream", daemon=True).start()

  def _read(self) -> None:
    try:
      while not self._closed.is_set():
        self._put((next(self._inner), self._inner.get_state()))
    except BaseException as error:
      self._put(error)

  def _put(self, item: Any) -> None:
    while not self._closed.is_set():
      with contextlib.suppress(queue.Full):
        return self._ahead.put(item, timeout=_LOOK)

  def __iter__(self) -> "StreamBatches":
    return self

  def __next__(self) -> dict[str, np.ndarray]:
    while True:
      try:
        item = self._ahead.get(timeout=_LOOK)
        break
      except queue.Empty:
        if self._closed.is_set() or self._stop():
          raise StopIteration from None
    if isinstance(item, BaseException):
      self.close()
      raise item
    batch, self.state = item
    return batch if self._rows is None else {name: x[self._rows] for name, x in batch.items()}

  def close(self) -> None:
    self._closed.set()


def opened(source: str, seed: int, key: str = "text") -> Callable[[int, int], Iterable[Any]]:
  """(epoch, document) -> the documents of that epoch from that number on; see the module.

  Raises:
    DataError: there is no text, or the function cannot be imported or called.
  """
  if re.fullmatch(r"[A-Za-z_][\w.]*:\w+", source) is None:
    inputs = sources.find_inputs(source)
    read = lambda: sources.read_inputs(inputs, Counter(), (key,))
    return lambda epoch, document: itertools.islice(read(), document, None)
  try:
    function = functions.found(source)
    found, given = function(), inspect.signature(function).parameters
  except BaseException as error:
    _reject(f"data.sources has {source!r}, which cannot be used", error)
  one = isinstance(found, str | bytes | Mapping | Set)  # a set has no order of its own
  if hasattr(found, "__getitem__") and (count := _length(found)) is not None and not one:
    if count <= 0:
      raise DataError(f"{source} has no documents.")
    rows = endless(found, str(seed), "windows")
    return lambda epoch, document: (rows[n] for n in itertools.count(document))
  if one or not hasattr(found, "__iter__"):
    raise DataError(
      f"{source} returns {type(found).__name__}, which has no documents; return a generator, or a"
      " dataset with `len` and rows by number."
    )
  if "start" in given:
    return lambda epoch, document: function(start=document)

  def again(epoch: int, document: int) -> Iterable[Any]:
    rows = function()
    if document and hasattr(rows, "skip"):
      return rows.skip(document)
    return itertools.islice(rows, document, None)

  return again


def _length(found: Any) -> int | None:
  """Number of rows; None if it has none, as iterable datasets, or gives no valid one."""
  try:
    return len(found)
  except Exception:
    return None


def _numbered(
  source: str, documents: Callable[[int, int], Iterable[Any]], epoch: int, first: int
) -> Iterator[tuple[int, Any]]:
  """(number, document); whatever a function of the user raises is an error that names it."""
  rows = None
  for number in itertools.count(first):
    try:
      rows = iter(documents(epoch, first)) if rows is None else rows
      row = next(rows)
    except StopIteration:
      return
    except DataError:
      raise
    except BaseException as error:  # SystemExit, too, which would end the thread alone
      _reject(f"{source}, document {number}: the function raised", error)
    yield number, row


def _reject(what: str, error: BaseException) -> NoReturn:
  """Raises a `SourceError`, with 1 if `error` is of a network, as it may be gone later."""
  code = 1 if isinstance(error, OSError) and error.filename is None else 2
  raise SourceError(f"{what}: {functions.explained(error)}.", code) from error
