"""Token files: the `.bin/.idx` pair of Megatron-LM, GPT-NeoX and RWKV.

`.bin` has the token ids of all sequences, concatenated, without header or padding, and `.idx` where
each starts (`train.data.index_file`). A pair is validated completely when it is opened, except for
the token ids (`IndexedDataset.check_tokens`), which are compared with their checksums when they are
read. Sequences must be stored in order and without gaps, as all known writers do, so that the file
is also one flat stream of tokens.

A pair may have a third file, `.weights`: a little-endian float32 per token of `.bin`, finite and
not negative, the weight of that token as a target of the loss. Without it all weights are 1. And it
may have a file `.crc32`, the checksums of `.bin`, of `.weights`, and of `.idx`, which older ones
lack (`train.data.checked_array`); without it what is read is not compared. Both formats are ours;
other readers of the pair ignore them.
"""

import contextlib
import hashlib
import os
import time
from array import array
from collections.abc import Sequence
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

import numpy as np

from lnssm_jax.files import atomic
from lnssm_jax.files.reading import open_regular, read_bytes, retried
from train.data import index_file
from train.data.checked_array import CheckedArray, Checksums, blocks_of
from train.data.errors import DataError, reading, writing
from train.data.index_file import DTYPES, REMAKE

SCAN = 1 << 24  # tokens checked at a time
_PATIENCE = 2.0  # seconds for another process to rename the files of a pair, one after the other
WEIGHTS = ".weights"
CHECKSUMS = ".crc32"


def dtype_for(vocab_size: int) -> np.dtype:
  """Customary dtype for a vocabulary size: uint16 below 65,500, else int32."""
  return np.dtype("<u2" if vocab_size < 65_500 else "<i4")


class IndexedDataset:
  """Reader of one pair; `prefix` is the path without `.bin` and `.idx`.

  Attributes:
    sizes: int32 [N], tokens of each sequence.
    pointers: int64 [N], byte offset of each sequence in `.bin`.
    doc_index: int64 [documents + 1], the sequence where each document starts; first 0, last N.
    tokens: all token ids in the dtype of the file; a slice is read from the file, and compared with
      the checksums of the pair.
    weights: float32 [tokens], of each token as a target, read alike; None if all are 1.

  Raises:
    DataError: a file is missing or unreadable, or the two are inconsistent; the message names the
      file, the field, the value found and the expectation.
  """

  def __init__(self, prefix: str | Path):
    self.prefix, end, settled = str(prefix), time.monotonic() + _PATIENCE, False
    while True:
      try:
        return self._open()
      except DataError:
        if settled or time.monotonic() > end:
          raise
      settled = not atomic.is_being_replaced(Path(self.prefix + ".idx"))
      time.sleep(0 if settled else 0.02)  # once more when it is settled: it may just be now

  def _open(self) -> None:
    with _open(self.prefix, ".idx") as file, reading(self.prefix + ".idx"):
      idx = np.memmap(file, np.uint8, "r").view(np.ndarray)
    index = index_file.parse(self.prefix + ".idx", idx)
    self.dtype, self.sizes = index.dtype, index.sizes
    self.pointers, self.doc_index = index.pointers, index.doc_index
    with _open(self.prefix, ".bin") as file:
      self.tokens = CheckedArray(file, self.prefix + ".bin", self.dtype)
    index_file.check(index, self.prefix, self.tokens.nbytes)
    self.weights = _open_weights(self.prefix, len(self.tokens))
    arrays = [self.tokens, *([] if self.weights is None else [self.weights])]
    _read_checksums(self.prefix, arrays, idx)

  @property
  def num_sequences(self) -> int:
    return len(self.sizes)

  @property
  def num_documents(self) -> int:
    return len(self.doc_index) - 1

  @property
  def num_tokens(self) -> int:
    return len(self.tokens)

  @property
  def document_starts(self) -> np.ndarray:
    """int64 [documents]: position in `tokens` where each document starts."""
    ends = np.append(self.pointers, self.tokens.nbytes)
    return ends[self.doc_index[:-1]] // self.dtype.itemsize

  def sequence(self, i: int) -> np.ndarray:
    """Token ids of sequence `i`, in the dtype of the file."""
    if not 0 <= i < self.num_sequences:
      raise IndexError(f"{self.prefix}: no sequence {i}; there are {self.num_sequences}.")
    start = int(self.pointers[i]) // self.dtype.itemsize
    return self.tokens[start : start + int(self.sizes[i])]

  def check_tokens(self, vocab_size: int) -> None:
    """Reads the whole file and rejects ids outside [0, vocab_size).

    Free if the dtype cannot represent such ids, otherwise one pass at memory bandwidth.
    """
    limits = np.iinfo(self.dtype)
    if limits.min >= 0 and limits.max < vocab_size:
      return
    for start in range(0, self.num_tokens, SCAN):
      stop = min(start + SCAN, self.num_tokens)
      ids = self.tokens.read(start, stop, compare=False)  # which takes longer than all the rest
      check_ids(ids, vocab_size, self.prefix + ".bin", start)

  def check_targets(self) -> None:
    """Raises DataError if no token has a weight above 0; reads up to the first that has."""
    if self.weights is None:
      return
    starts = range(0, self.num_tokens, SCAN)
    stop = lambda start: min(start + SCAN, self.num_tokens)
    if not any((self.weights.read(x, stop(x), compare=False) > 0).any() for x in starts):
      raise DataError(
        f"{self.prefix}.weights has no weight above 0, so no token is a target of the loss; write"
        " it again, or remove it to count all tokens."
      )

  def __reduce__(self):
    return IndexedDataset, (self.prefix,)  # pickling: another process opens the files again

  def __repr__(self) -> str:
    return f"IndexedDataset({self.prefix!r})"


class IndexedWriter:
  """Writes one pair and its checksums, document by document, atomically.

      with IndexedWriter("data/train", dtype_for(vocab_size)) as writer:
        writer.add_document(ids)

  The files have temporary names until the block ends, so that an error inside it leaves existing
  files unchanged. Then each replaces the one of its name: none is ever missing, and readers reject
  new files with old ones by their checksums.

  Args:
    weighted: whether to write `.weights` too; otherwise one that exists is removed.

  Attributes:
    num_documents, num_tokens: counts so far.

  Raises:
    DataError: the folder cannot be written, an id exceeds `dtype`, or nothing was added.
  """

  def __init__(self, prefix: str | Path, dtype: np.typing.DTypeLike, *, weighted: bool = False):
    self.prefix = str(prefix)
    self.dtype: np.dtype[Any] = np.dtype(dtype).newbyteorder("<")
    codes = [code for code, name in DTYPES.items() if np.dtype(name) == np.dtype(dtype)]
    if not codes:
      raise DataError(
        f"{self.prefix}: token files have {', '.join(DTYPES.values())}, not {self.dtype.name}; use"
        " dtype_for(vocab_size)."
      )
    self._code = codes[0]
    self._sizes = array("i")
    self._hashes = {end: hashlib.sha256() for end in (".bin", *([WEIGHTS] if weighted else []))}
    self._checksums = {end: Checksums() for end in self._hashes}
    self.num_tokens = 0

  @property
  def num_documents(self) -> int:
    return len(self._sizes)

  def __enter__(self) -> "IndexedWriter":
    self._partial: dict[str, Path] = {}
    with writing(self.prefix), contextlib.ExitStack() as opened:
      self._files = {end: opened.enter_context(self._create(end)) for end in self._hashes}
      self._opened = opened.pop_all()
    return self

  def _create(self, end: str) -> FileIO:
    """Creates the file of a new name that replaces `prefix + end` later."""
    path = Path(self.prefix + end)
    atomic.remove_leftovers(path)
    self._partial[end] = atomic.partial_name(path)
    return atomic.create(self._partial[end])

  def add_document(
    self, ids: np.typing.ArrayLike, weights: np.typing.ArrayLike | None = None
  ) -> None:
    """Appends the tokens of one document, integers [tokens], as one sequence.

    Args:
      weights: [tokens], of a writer that is `weighted`; None: all are 1.
    """
    ids = np.asarray(ids)
    where = f"{self.prefix}: document {self.num_documents}"
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and len(ids)):
      raise DataError(
        f"{where} has shape {ids.shape} and dtype {ids.dtype}; a vector of integer ids is needed."
      )
    if len(ids) > np.iinfo(np.int32).max:
      raise DataError(
        f"{where} has {len(ids)} tokens, but a sequence has at most 2**31 - 1; split it."
      )
    check_ids(ids, np.iinfo(self.dtype).max + 1, where, 0)
    self._append(".bin", ids.astype(self.dtype))
    if WEIGHTS in self._hashes:
      weights = np.asarray(np.ones(len(ids)) if weights is None else weights, "<f4")
      if weights.shape != ids.shape:
        raise DataError(f"{where} has {len(ids)} tokens and weights of shape {weights.shape}.")
      check_weights(weights, where, 0)
      self._append(WEIGHTS, weights)
    elif weights is not None:
      raise DataError(f"{where} has weights; use IndexedWriter(..., weighted=True).")
    self._sizes.append(len(ids))
    self.num_tokens += len(ids)

  def digests(self) -> dict[str, str]:
    """As entries of a sidecar: the SHA-256 of what has been added so far."""
    names = {".bin": "sha256", WEIGHTS: "weights_sha256"}
    return {names[end]: each.hexdigest() for end, each in self._hashes.items()}

  def _append(self, end: str, array: np.ndarray) -> None:
    with writing(self._partial[end]):
      atomic.write_all(self._files[end], array)
    self._hashes[end].update(array.data)
    self._checksums[end].update(array.data)

  def __exit__(self, kind, error, traceback) -> None:
    try:
      try:
        if kind is None:
          self._finish()
      finally:
        with writing(self.prefix):
          self._opened.close()
    finally:
      for path in self._partial.values():
        path.unlink(missing_ok=True)

  def _finish(self) -> None:
    if not self.num_tokens:
      raise DataError(f"{self.prefix}: no tokens were added, so there is nothing to write.")
    sizes = np.frombuffer(self._sizes, np.int32).astype("<i4")
    index = index_file.packed(self._code, sizes, self.dtype.itemsize)
    checksums = [each.array() for each in (*self._checksums.values(), _checksums_of(index))]
    with writing(self.prefix):
      for end, parts in ((".idx", index), (CHECKSUMS, checksums)):
        self._files[end] = self._opened.enter_context(self._create(end))
        for part in parts:
          atomic.write_all(self._files[end], part)
      for file in self._files.values():
        atomic.sync_file(file)
      # While they are open: other writers remove partial files that are not. The checksums first: a
      # crash between these lines leaves none that fit both new and old files.
      os.replace(self._partial[CHECKSUMS], self.prefix + CHECKSUMS)
      if WEIGHTS not in self._hashes:
        Path(self.prefix + WEIGHTS).unlink(missing_ok=True)
      for end in (*self._hashes, ".idx"):
        os.replace(self._partial[end], self.prefix + end)
      retried(lambda: atomic.sync_folder(Path(self.prefix).parent))


def check_ids(ids: np.ndarray, vocab_size: int, where: str, start: int) -> None:
  """Rejects ids outside [0, vocab_size), naming the first; `start` is the position of ids[0]."""
  if len(ids) and (ids.max() >= vocab_size or ids.min() < 0):
    bad = int(np.flatnonzero((ids >= vocab_size) | (ids < 0))[0])
    raise DataError(
      f"{where}: token {start + bad} has the id {int(ids[bad])}, but ids must be in"
      f" [0, {vocab_size}). The tokens are from another tokenizer, or the file is damaged: use the"
      " matching model and tokenizer (model.vocab_size, data.tokenizer)."
    )


def check_weights(weights: np.ndarray, where: str, start: int) -> None:
  """Rejects weights that are negative or not finite; `start` is the position of weights[0]."""
  wrong = ~(np.isfinite(weights) & (weights >= 0))
  if wrong.any():
    bad = int(np.argmax(wrong))
    raise DataError(
      f"{where}: token {start + bad} has the weight {weights[bad]}, but weights are finite and not"
      f" negative. {REMAKE}"
    )


def _open_weights(prefix: str, tokens: int) -> CheckedArray | None:
  """The float32 [tokens] of `.weights`; None if the pair has none."""
  path = Path(prefix + WEIGHTS)
  with reading(path):
    if not path.exists():
      return None
  with _open(prefix, WEIGHTS) as file:
    weights = CheckedArray(file, str(path), "<f4")
  if weights.nbytes != 4 * tokens:
    raise DataError(
      f"{path}: found {weights.nbytes} bytes, expected {4 * tokens} for the {tokens} tokens of"
      f" {prefix}.bin. {REMAKE}"
    )
  return weights


def _checksums_of(parts: Sequence[bytes | np.ndarray]) -> Checksums:
  checksums = Checksums()
  for part in parts:
    checksums.update(part.data if isinstance(part, np.ndarray) else part)
  return checksums


def _read_checksums(prefix: str, arrays: Sequence[CheckedArray], idx: np.ndarray) -> None:
  """Gives the arrays their checksums, if the pair has any, and compares those of the index."""
  path = Path(prefix + CHECKSUMS)
  with reading(path):
    if not path.exists():
      return
    raw = read_bytes(path, 1 << 32, follow_links=True)
  blocks = [*(blocks_of(each.nbytes) for each in arrays), blocks_of(len(idx))]
  if len(raw) not in (4 * sum(blocks), 4 * sum(blocks[:-1])):
    raise DataError(
      f"{path}: found {len(raw)} bytes, expected {4 * sum(blocks)}: it is of other token files. "
      f"If those of {prefix} are right, delete it. {REMAKE}"
    )
  *parts, of_index = np.split(np.frombuffer(raw, "<u4"), np.cumsum(blocks)[:-1])
  for each, part in zip(arrays, parts, strict=True):
    each.checksums = part
  if len(of_index) and not np.array_equal(of_index, _checksums_of([idx]).array()):
    raise DataError(
      f"{prefix}.idx has other checksums than {path.name} says: one of the two files has changed "
      f"since it was written, or is of another pair. {REMAKE}"
    )


def _open(prefix: str, end: str) -> BufferedReader:
  """Opens the file `prefix + end`, which has at least one byte."""
  path = Path(prefix + end)
  with reading(path):
    exists = path.exists()
  if not exists:
    other = prefix + {".bin": ".idx", ".idx": ".bin"}[end]
    if Path(other).exists():
      hint = f"only {other} exists; the two belong together. {REMAKE}"
    elif prefix.endswith((".bin", ".idx")):
      hint = f"use the prefix of the pair, {prefix[:-4]!r}."
    else:
      hint = "create it with `lnssm-train tokenize`."
    raise DataError(f"{path} does not exist; {hint}")
  if not path.is_file():
    raise DataError(f"{path} is not a file, but a pair is two files. {REMAKE}")
  with reading(path):
    file = open_regular(path, follow_links=True)
  if not os.fstat(file.fileno()).st_size:
    file.close()
    raise DataError(f"{path} is empty (0 bytes). {REMAKE}")
  return file
