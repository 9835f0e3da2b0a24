"""Tokenizers of models: raw bytes, or any `tokenizer.json` (with the package `tokenizers`)."""

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

from lnssm_jax.pretrained.files import DataError, read_bytes, reading

END_OF_TEXT = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")
PIECE = 1 << 14  # characters after which a long text is split at the next safe position
_MAX_FILE = 1 << 28  # bytes of a tokenizer.json
_MAX_GROWTH = 256  # times that replacements may lengthen a text, in the worst case


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
  """Tokenizer of a `tokenizer.json`, without truncation, padding or added special tokens.

  Args:
    end_of_text: the token that ends a text, or its id; None looks for one of `END_OF_TEXT`.
    raw: the content, of a `path` that is no such file itself.

  Raises:
    DataError: the file is missing or unusable, or has no such token.
  """

  def __init__(
    self,
    path: str | Path,
    spec: str | None = None,
    *,
    follow_links: bool = True,
    end_of_text: int | str | None = None,
    raw: bytes | None = None,
  ):
    path = Path(path)
    self.spec = spec or str(path)
    if raw is None:
      if path.is_dir():
        raise DataError(f"the tokenizer {path} is a folder; use the tokenizer.json in it.")
      with reading(path):
        raw = read_bytes(path, _MAX_FILE, follow_links=follow_links)
    tokenizers = _import_tokenizers(path)
    with _library(f"{path} is not a tokenizer.json"):
      inner = tokenizers.Tokenizer.from_buffer(raw)
      settings = json.loads(raw)
      _check_growth(settings)
      self._can_split = _can_split_before_newline(settings)
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = True
    self.raw = raw  # content of the file
    self.vocab_size = 1 + max(inner.get_vocab().values(), default=0)
    known = (inner.token_to_id(end) for end in END_OF_TEXT)
    usual = next((end for end in known if end is not None), None)
    end = usual if end_of_text is None else end_of_text
    if isinstance(end, str):
      end = inner.token_to_id(end)
      if end is None:
        raise DataError(f"{path} has no token {end_of_text!r} to end a text; name one that it has.")
    if end is None:
      raise DataError(
        f"{path} has no end-of-text token; none of {', '.join(END_OF_TEXT)} is in its vocabulary."
        " Name the token by data.end_of_text."
      )
    self.end_of_text: int = end
    self.named_end = None if end == usual else inner.id_to_token(end)
    # Another end gives other ids.
    self.fingerprint = hashlib.sha256(raw + (b"" if end == usual else b"%d" % end)).hexdigest()
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
    return list(split(text))


def split(text: str) -> Iterator[str]:
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


def _import_tokenizers(path: Path):
  try:
    import tokenizers
  except ImportError:
    raise DataError(f"{path} needs the package tokenizers: pip install tokenizers") from None
  return tokenizers


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


def _check_growth(settings: dict) -> None:
  """Raises ValueError if replacements could make a text, or decoded tokens, far longer.

  A few bytes of such a file, several replacements in sequence, would fill any memory.
  """
  for name in ("normalizer", "decoder"):
    factor = _growth(settings.get(name) or {})
    if factor > _MAX_GROWTH:
      raise ValueError(
        f"its {name} can make a text {factor:.3g} times longer, more than {_MAX_GROWTH} times"
      )


def _growth(step: dict) -> float:
  """Largest factor by which the replacements of a normalizer or decoder lengthen a text."""
  match step:
    case {"type": "Sequence"}:
      inner = step.get("normalizers", step.get("decoders", []))
      return math.prod(map(_growth, inner))
    case {"type": "Replace", "content": str(content)}:
      found = step["pattern"].get("String")
      # A regular expression, like an empty text, may match between any two letters.
      return max(1.0, len(content) / len(found)) if found else 1.0 + len(content)
    case {"type": "Prepend", "prepend": str(content)}:
      return 1.0 + len(content)
    case {"type": "Precompiled", "precompiled_charsmap": str(charsmap)}:
      raw = base64.b64decode(charsmap)  # the size of a trie, the trie, texts that end in a zero
      texts = raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")
      return max(1.0, *map(len, texts))
  return 1.0


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
