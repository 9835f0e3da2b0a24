"""Token files: the `.bin/.idx` pair of Megatron-LM, GPT-NeoX and RWKV.

`.bin` has the token ids of all sequences, concatenated, without header or padding. `.idx` is

    offset   bytes   field
    0        9       magic "MMIDIDX" and two zero bytes
    9        8       version, 1
    17       1       dtype code: 1 uint8, 3 int16, 4 int32, 5 int64, 8 uint16
    18       8       N, the number of sequences
    26       8       D, the length of doc_index: the number of documents + 1
    34       4 N     sizes, int32: tokens of each sequence
    .        8 N     pointers, int64: byte offset of each sequence in .bin
    .        8 D     doc_index, int64: the sequence where each document starts; first 0, last N

with all numbers little-endian. A pair is validated completely when it is opened, except for the
token ids (`IndexedDataset.check_tokens`): any pair that opens can be read without errors. Sequences
must be stored in order and without gaps, as all known writers do, so that the file is also one flat
stream of tokens.

A pair may have a third file, `.weights`: a little-endian float32 per token of `.bin`, finite and
not negative, the weight of that token as a target of the loss. Without it all weights are 1. The
format is ours; other readers of the pair ignore it.
"""

import contextlib
import hashlib
import os
import struct
from array import array
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from lnssm_jax.pretrained.files import open_regular
from train.checkpoint import safe_files
from train.data.errors import DataError, reading, writing

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "uint8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
UNSUPPORTED = {2: "int8", 6: "floating point", 7: "floating point"}
REMAKE = "Create the pair again with `python -m train tokenize`, or copy both files again."
SCAN = 1 << 24  # tokens checked at a time
WEIGHTS = ".weights"


def dtype_for(vocab_size: int) -> np.dtype:
  """Customary dtype for a vocabulary size: uint16 below 65,500, else int32."""
  return np.dtype("<u2" if vocab_size < 65_500 else "<i4")


class IndexedDataset:
  """Memory-mapped reader of one pair; `prefix` is the path without `.bin` and `.idx`.

  Attributes:
    sizes: int32 [N], tokens of each sequence.
    pointers: int64 [N], byte offset of each sequence in `.bin`.
    doc_index: int64 [documents + 1], the sequence where each document starts; first 0, last N.
    tokens: all token ids as one flat array in the dtype of the file.
    weights: float32 [tokens], of each token as a target; None if all are 1.

  Raises:
    DataError: a file is missing or unreadable, or the two are inconsistent; the message names the
      file, the field, the value found and the expectation.
  """

  def __init__(self, prefix: str | Path):
    self.prefix = str(prefix)
    idx = _map_file(self.prefix, ".idx")
    code, N, D = _read_header(self.prefix + ".idx", idx)
    self.dtype = np.dtype(DTYPES[code]).newbyteorder("<")
    offset = HEADER.size
    self.sizes = np.frombuffer(idx, "<i4", N, offset)
    self.pointers = np.frombuffer(idx, "<i8", N, offset + 4 * N)
    self.doc_index = np.frombuffer(idx, "<i8", D, offset + 12 * N)
    raw = _map_file(self.prefix, ".bin")
    _check_index(self, len(raw))
    self.tokens = raw.view(self.dtype)
    self.weights = _map_weights(self.prefix, len(self.tokens))

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
    """Token ids of sequence `i`, a view of the file, in its dtype."""
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
      check_ids(self.tokens[start : start + SCAN], vocab_size, self.prefix + ".bin", start)

  def __reduce__(self):
    return IndexedDataset, (self.prefix,)  # pickling: another process maps the files again

  def __repr__(self) -> str:
    return f"IndexedDataset({self.prefix!r})"


class IndexedWriter:
  """Writes one pair, document by document, atomically.

      with IndexedWriter("data/train", dtype_for(vocab_size)) as writer:
        writer.add_document(ids)

  The files have temporary names until the block ends, so that readers never see an incomplete pair,
  and an error inside the block leaves existing files unchanged.

  Args:
    weighted: whether to write `.weights` too; otherwise one that exists is removed.

  Attributes:
    num_documents, num_tokens: counts so far.
    sha256, weights_sha256: digests of the complete `.bin` and `.weights` files, in hexadecimal.

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
    self.num_tokens = 0
    self.sha256 = self.weights_sha256 = ""

  @property
  def num_documents(self) -> int:
    return len(self._sizes)

  def __enter__(self) -> "IndexedWriter":
    self._partial: dict[str, Path] = {}
    with writing(self.prefix), contextlib.ExitStack() as opened:
      self._files = {end: opened.enter_context(self._create(end)) for end in self._hashes}
      self._close = opened.pop_all().close
    return self

  def _create(self, end: str) -> FileIO:
    """Creates the file of a new name that replaces `prefix + end` later."""
    path = Path(self.prefix + end)
    safe_files.remove_leftovers(path)
    self._partial[end] = safe_files.partial_name(path)
    return safe_files.create(self._partial[end])

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

  def _append(self, end: str, array: np.ndarray) -> None:
    with writing(self._partial[end]):
      safe_files.write_all(self._files[end], array)
    self._hashes[end].update(array.data)

  def __exit__(self, kind, error, traceback) -> None:
    try:
      try:
        with writing(self.prefix):
          for file in self._files.values() if kind is None else ():
            os.fsync(file.fileno())
      finally:
        with writing(self.prefix):
          self._close()
      if kind is None:
        self._finish()
    finally:
      for path in self._partial.values():
        path.unlink(missing_ok=True)

  def _finish(self) -> None:
    if not self.num_tokens:
      raise DataError(f"{self.prefix}: no tokens were added, so there is nothing to write.")
    N = self.num_documents
    sizes = np.frombuffer(self._sizes, np.int32).astype("<i4")
    pointers = np.zeros(N, "<i8")
    np.cumsum(sizes[:-1].astype("<i8") * self.dtype.itemsize, out=pointers[1:])
    header = HEADER.pack(MAGIC, 1, self._code, N, N + 1)
    with writing(self.prefix):
      with self._create(".idx") as file:
        for part in (header, sizes, pointers, np.arange(N + 1, dtype="<i8")):
          safe_files.write_all(file, part)
        os.fsync(file.fileno())
      # A .bin without its index is rejected, so a crash between these lines cannot leave a new .bin
      # with an old .idx that happens to match.
      Path(self.prefix + ".idx").unlink(missing_ok=True)
      Path(self.prefix + WEIGHTS).unlink(missing_ok=True)
      for end in (*self._hashes, ".idx"):
        os.replace(self._partial[end], self.prefix + end)
      safe_files.sync_folder(Path(self.prefix).parent)
    self.sha256 = self._hashes[".bin"].hexdigest()
    if WEIGHTS in self._hashes:
      self.weights_sha256 = self._hashes[WEIGHTS].hexdigest()


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


def _map_weights(prefix: str, tokens: int) -> np.ndarray | None:
  """Memory-maps `.weights` as float32 [tokens]; None if the pair has none."""
  path = Path(prefix + WEIGHTS)
  with reading(path):
    if not path.exists():
      return None
  raw = _map_file(prefix, WEIGHTS)
  if len(raw) != 4 * tokens:
    raise DataError(
      f"{path}: found {len(raw)} bytes, expected {4 * tokens} for the {tokens} tokens of"
      f" {prefix}.bin. {REMAKE}"
    )
  return raw.view("<f4")


def _map_file(prefix: str, end: str) -> np.ndarray:
  """Memory-maps the file `prefix + end` as uint8 [bytes]."""
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
      hint = "create it with `python -m train tokenize`."
    raise DataError(f"{path} does not exist; {hint}")
  if not path.is_file():
    raise DataError(f"{path} is not a file, but a pair is two files. {REMAKE}")
  with reading(path), open_regular(path, follow_links=True) as file:
    if not os.fstat(file.fileno()).st_size:
      raise DataError(f"{path} is empty (0 bytes). {REMAKE}")
    return np.memmap(file, np.uint8, "r").view(np.ndarray)


def _read_header(path: str, idx: np.ndarray) -> tuple[int, int, int]:
  """Checks the header of a mapped `.idx` and returns (dtype code, N, D)."""

  def mismatch(offset: int, field: str, found: object, expected: str) -> DataError:
    return DataError(
      f"{path}, offset {offset} ({field}): found {found}, expected {expected}. {REMAKE}"
    )

  if len(idx) < len(MAGIC) or idx[: len(MAGIC)].tobytes() != MAGIC:
    found = repr(idx[: len(MAGIC)].tobytes())
    raise mismatch(0, "magic", found, f"{MAGIC!r}; this is not an index file, or it is damaged")
  if len(idx) < HEADER.size:
    raise mismatch(len(idx), "end of file", f"{len(idx)} bytes", f"{HEADER.size} of header alone")
  _, version, code, N, D = HEADER.unpack(idx[: HEADER.size].tobytes())
  if version != 1:
    raise mismatch(9, "version", version, "1, the only version there is")
  if code not in DTYPES:
    what = f"{code} ({UNSUPPORTED.get(code, 'unknown')})"
    names = ", ".join(f"{c} {name}" for c, name in DTYPES.items())
    raise mismatch(17, "dtype code", what, f"one for token ids: {names}")
  if N == 0:
    raise mismatch(18, "number of sequences", 0, "at least one; the dataset is empty")
  # Python integers do not overflow, and nothing is allocated before the counts are checked.
  room = len(idx) - HEADER.size
  if room // 12 < N:
    raise mismatch(18, "number of sequences", N, f"at most {room // 12} in {len(idx)} bytes")
  if D < 2 or room // 8 < D:
    raise mismatch(26, "length of doc_index", D, f"2 to {room // 8} in {len(idx)} bytes")
  end = HEADER.size + 12 * N + 8 * D
  if len(idx) < end:
    wanted = f"{end} for {N} sequences and {D - 1} documents; the file is cut off"
    raise mismatch(len(idx), "end of file", f"{len(idx)} bytes", wanted)
  if len(idx) > end:
    extra = len(idx) - end
    what = f"{extra} more bytes" + (" (modes of a multimodal dataset?)" if extra == N else "")
    raise mismatch(end, "end of file", what, f"the file to end here, after {D - 1} documents")
  return code, N, D


def _check_index(data: IndexedDataset, bin_bytes: int) -> None:
  """Checks that sizes, pointers and doc_index describe a `.bin` of `bin_bytes` bytes."""
  sizes, pointers, docs = data.sizes, data.pointers, data.doc_index
  N, item = len(sizes), data.dtype.itemsize
  idx, bin = data.prefix + ".idx", data.prefix + ".bin"

  def reject(field: str, i: int, expected: str) -> None:
    values, start, width = {
      "size": (sizes, HEADER.size, 4),
      "pointer": (pointers, HEADER.size + 4 * N, 8),
      "doc_index": (docs, HEADER.size + 12 * N, 8),
    }[field]
    raise DataError(
      f"{idx}, offset {start + width * i} ({field} {i}): found {int(values[i])}, expected"
      f" {expected}. {REMAKE}"
    )

  def reject_any(bad: np.ndarray, field: str, expected: str) -> None:
    if bad.any():
      reject(field, int(np.argmax(bad)), expected)

  if bin_bytes % item:
    raise DataError(
      f"{bin}: found {bin_bytes} bytes, expected a multiple of {item}, the bytes of one"
      f" {data.dtype.name} token. {REMAKE}"
    )
  reject_any(sizes < 0, "size", "a number of tokens, 0 or more")
  reject_any(pointers < 0, "pointer", "a byte offset, 0 or more")
  reject_any(pointers > bin_bytes, "pointer", f"an offset inside the {bin_bytes} bytes of {bin}")
  reject_any(pointers % item != 0, "pointer", f"a multiple of the {item} bytes of a token")
  room = (bin_bytes - pointers) // item  # pointers are in range, so this cannot overflow
  reject_any(sizes > room, "size", f"a sequence that ends inside the {bin_bytes} bytes of {bin}")
  ends = pointers + sizes.astype(np.int64) * item
  gap = pointers != np.append(0, ends[:-1])
  reject_any(gap, "pointer", "the end of the sequence before; they must neither overlap nor skip")
  if ends[-1] != bin_bytes:
    raise DataError(
      f"{bin}: found {bin_bytes} bytes, expected {int(ends[-1])} for the {N} sequences of"
      f" {idx}. The two files are not of one pair, or one is damaged. {REMAKE}"
    )
  reject_any((docs < 0) | (docs > N), "doc_index", f"the number of a sequence, 0 to {N}")
  if docs[0] != 0:
    reject("doc_index", 0, "0, the first sequence")
  reject_any(np.diff(docs, prepend=0) < 0, "doc_index", "no less than the one before")
  if docs[-1] != N:
    reject("doc_index", len(docs) - 1, f"{N}, the number of sequences")
