"""Tokenizers: raw bytes, any `tokenizer.json`, or a byte-level BPE trained here."""

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from train.data.errors import DataError, reading, writing

END_OF_TEXT = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")
LEAST_BPE = 257  # 256 bytes and the end of text
PIECE = 1 << 14  # characters after which a long text is split at the next safe position


class Tokenizer(Protocol):
  """Interface of a tokenizer.

  Attributes:
    spec: its name or path, as in `data.tokenizer`.
    fingerprint: equal only for tokenizers that produce equal ids.
    vocab_size: one more than the largest id.
    end_of_text: the id that ends every document.
  """

  spec: str
  fingerprint: str
  vocab_size: int
  end_of_text: int

  def encode(self, text: str) -> np.ndarray:
    """Returns int32 [tokens]; a special token spelled out in `text` is ordinary text."""
    ...

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Encodes each text, in parallel if the tokenizer can."""
    ...

  def decode(self, ids: Iterable[int]) -> str:
    """Text of `ids`, without end-of-text; bytes that are not UTF-8 become U+FFFD."""
    ...

  def pieces(self, text: str) -> list[str]:
    """Splits `text` such that the concatenated tokens of the pieces are the tokens of `text`."""
    ...


class ByteTokenizer:
  """Ids 0 to 255 are UTF-8 bytes, 256 is end-of-text."""

  spec = fingerprint = "bytes"
  vocab_size = 257
  end_of_text = 256

  def encode(self, text: str) -> np.ndarray:
    return np.frombuffer(_utf8(text), np.uint8).astype(np.int32)

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    return [self.encode(text) for text in texts]

  def decode(self, ids: Iterable[int]) -> str:
    return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")

  def pieces(self, text: str) -> list[str]:
    return [text]


class FileTokenizer:
  """Tokenizer of a `tokenizer.json`, without truncation, padding or added special tokens."""

  def __init__(self, path: str | Path, spec: str | None = None):
    path = Path(path)
    self.spec = spec or str(path)
    if path.is_dir():
      raise DataError(f"the tokenizer {path} is a folder; use the tokenizer.json in it.")
    with reading(path):
      raw = path.read_bytes()
    with _library(f"{path} is not a tokenizer.json"):
      inner = tokenizers.Tokenizer.from_buffer(raw)
      self._can_split = _can_split_before_newline(json.loads(raw))
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = True
    self.raw = raw  # content of the file
    self.fingerprint = hashlib.sha256(raw).hexdigest()
    self.vocab_size = 1 + max(inner.get_vocab().values(), default=0)
    ends = [inner.token_to_id(end) for end in END_OF_TEXT]
    self.end_of_text: int = next((end for end in ends if end is not None), -1)
    if self.end_of_text < 0:
      raise DataError(
        f"{path} has no end-of-text token; one of {', '.join(END_OF_TEXT)} must be in its"
        " vocabulary. Add it to the file's added_tokens."
      )
    self._inner = inner

  def encode(self, text: str) -> np.ndarray:
    parts = self.encode_batch(self.pieces(text))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    for text in texts:
      _utf8(text)
    with _library(f"the tokenizer {self.spec} cannot encode a text"):
      found = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array(encoding.ids, np.int32) for encoding in found]

  def decode(self, ids: Iterable[int]) -> str:
    kept = [int(i) for i in ids if i != self.end_of_text]
    with _library(f"the tokenizer {self.spec} cannot decode"):
      return self._inner.decode(kept, skip_special_tokens=False)

  def pieces(self, text: str) -> list[str]:
    if not self._can_split:
      return [text]
    return list(_split(text))


def load_tokenizer(spec: str, folder: str | Path | None = None) -> Tokenizer:
  """Loads the tokenizer named by `data.tokenizer`.

  Args:
    spec: "bytes"; "bpe:N", which `prepare` trained and saved in `folder`; or the path of a
      tokenizer.json, in which `~` and environment variables are expanded.
    folder: `data.folder`; only "bpe:N" needs it.

  Raises:
    DataError: the file is missing or unusable, or does not have N entries.
  """
  if spec == "bytes":
    return ByteTokenizer()
  if not spec.startswith("bpe:"):
    return _load_file(spec)
  size = bpe_size(spec)
  if folder is None:
    raise DataError(f"the tokenizer {spec!r} is stored in the folder of its data; set data.folder.")
  path = bpe_path(folder)
  if not path.is_file():
    raise DataError(
      f"{path} does not exist: {spec!r} is trained when the data is prepared. Run"
      " `python -m train tokenize --config FILE`."
    )
  tokenizer = FileTokenizer(path, spec)
  if tokenizer.vocab_size != size:
    raise DataError(
      f"{path} has {tokenizer.vocab_size} entries, but data.tokenizer={spec!r} needs {size}; set"
      f" data.tokenizer='bpe:{tokenizer.vocab_size}', or prepare the data in another data.folder."
    )
  return tokenizer


def bpe_size(spec: str) -> int:
  """Returns N of "bpe:N"."""
  number = spec.removeprefix("bpe:")
  if not (number.isascii() and number.isdecimal()) or int(number) < LEAST_BPE:
    raise DataError(
      f"the tokenizer {spec!r} needs a whole number of entries of at least {LEAST_BPE}, as in"
      " 'bpe:4096'."
    )
  return int(number)


def bpe_path(folder: str | Path) -> Path:
  """Path of the BPE of a data folder."""
  return Path(folder) / "tokenizer.json"


def train_bpe(spec: str, folder: str | Path, texts: Iterable[str]) -> Tokenizer:
  """Trains "bpe:N" on `texts`, saves it in `folder` and returns it.

  The same texts give the same file, byte for byte. Every text can be encoded and decoded exactly.

  Raises:
    DataError: the texts do not have enough distinct pairs for N entries.
  """
  size = bpe_size(spec)
  inner = tokenizers.Tokenizer(tokenizers.models.BPE())
  inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  inner.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=size,
    show_progress=False,
    special_tokens=[END_OF_TEXT[0]],
    initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
  )
  inner.train_from_iterator((piece for text in texts for piece in _split(text)), trainer)
  found = inner.get_vocab_size()
  if found < size:
    raise DataError(
      f"the training text supports only {found} entries for data.tokenizer={spec!r}; use"
      f" 'bpe:{found}' or fewer, or more text."
    )
  path = bpe_path(folder)
  partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
  try:
    with writing(path):
      partial.write_text(inner.to_str(pretty=True) + "\n", encoding="utf-8")
      os.replace(partial, path)
  finally:
    partial.unlink(missing_ok=True)
  return load_tokenizer(spec, folder)


def _load_file(spec: str) -> FileTokenizer:
  path = Path(os.path.expanduser(os.path.expandvars(spec)))
  if not path.exists():
    raise DataError(
      f"there is no tokenizer {spec!r}; use 'bytes', 'bpe:N', or the path of a tokenizer.json."
    )
  return FileTokenizer(path, spec)


def _split(text: str) -> Iterator[str]:
  """Pieces of at least PIECE characters; see `_can_split_before_newline`."""
  start = 0
  while len(text) - start > PIECE:
    cut = text.find("\n", start + PIECE)
    while cut > 0 and text[cut - 1].isspace():
      cut = text.find("\n", cut + 1)
    if cut < 0:
      break
    yield text[start:cut]
    start = cut
  yield text[start:]


@contextmanager
def _library(failed: str) -> Iterator[None]:
  """Converts errors of the library to DataError: bare Exceptions, and panics (BaseException)."""
  try:
    yield
  except (KeyboardInterrupt, SystemExit):
    raise
  except BaseException as error:
    raise DataError(f"{failed}: {error}.") from error


def _utf8(text: str) -> bytes:
  try:
    return text.encode()
  except UnicodeEncodeError as error:
    raise DataError(
      f"the text has an unpaired surrogate at character {error.start}, which cannot be encoded."
      " Replace it."
    ) from error


def _can_split_before_newline(settings: dict) -> bool:
  """Whether a text may be split between a non-space character and a newline after it.

  GPT-2's byte-level pre-tokenizer starts a new word exactly there and looks ahead no further than
  the next non-space character; NFC composes nothing across a newline. Added tokens that contain a
  newline, or strip spaces around them, could span the split.
  """
  words, normal = settings.get("pre_tokenizer") or {}, settings.get("normalizer")
  added = settings.get("added_tokens") or []
  return (
    words.get("type") == "ByteLevel"
    and words.get("use_regex", True)
    and not words.get("add_prefix_space", True)
    and (normal is None or normal.get("type") == "NFC")
    and not any(
      "\n" in token["content"] or token["lstrip"] or token["rstrip"] or token["single_word"]
      for token in added
    )
  )
