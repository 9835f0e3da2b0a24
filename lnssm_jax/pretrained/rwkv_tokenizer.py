"""The tokenizer of RWKV World: the longest token of a vocabulary of byte strings, again and again.

The author's file, `rwkv_vocab_v20230424.txt`, has lines such as `258 'in' 2`: an id, a text or
bytes as a literal of Python, and the number of bytes. It is read, not run.
"""

import ast
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from lnssm_jax.files.reading import DataError, read_bytes, reading
from lnssm_jax.pretrained import special_tokens as special
from lnssm_jax.pretrained.special_tokens import Added, InText
from lnssm_jax.pretrained.tokenizers import FileTokenizer, Tokenizer, utf8

_MOST_BYTES, _MOST_TOKENS, _MOST_LINE, _LONGEST = 1 << 24, 1 << 20, 4096, 512
_QUOTES = ("'", '"', "b'", 'b"')


class WorldTokenizer:
  """Tokenizer of a vocabulary file of RWKV World. Token 0, which no text spells out, ends a text.

  Every text has one encoding, of which the bytes are those of the text: the 256 bytes are tokens.

  Raises:
    DataError: the file is missing, or no such vocabulary; the message has the line.
  """

  end_of_text = 0
  added = Added()

  def __init__(self, path: str | Path, spec: str | None = None):
    self.spec = spec or str(path)
    with reading(path):
      raw = read_bytes(path, _MOST_BYTES, follow_links=True)
    try:
      lines = raw.decode().rstrip("\n").split("\n")
    except UnicodeDecodeError as error:
      raise DataError(f"{path} is no vocabulary of RWKV World: {error}.") from None
    self._bytes: dict[int, bytes] = {}
    self._ids: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
      try:
        token, text = _entry(line)
        if token in self._bytes or text in self._ids:
          raise ValueError("its id or its text is that of an earlier line")
      except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise DataError(
          f"{path}, line {number}: {line!r:.60} is no entry such as 258 'in' 2: {error}."
        ) from None
      self._bytes[token], self._ids[text] = text, token
    missing = [n for n in range(256) if bytes([n]) not in self._ids]
    if missing:
      raise DataError(f"{path} has no token for the byte {missing[0]}, so not every text has one.")
    found: dict[bytes, set[int]] = {}
    for text in self._ids:
      found.setdefault(text[:2], set()).add(len(text))
    self._lengths = {start: sorted(lengths, reverse=True) for start, lengths in found.items()}
    self.vocab_size = 1 + max(self._bytes)
    self.fingerprint = hashlib.sha256(raw).hexdigest()

  def encode_bytes(self, data: bytes) -> np.ndarray:
    """int32 [tokens] of any bytes, also those that are no text."""
    ids, start, size = [], 0, len(data)
    while start < size:
      for length in (*self._lengths.get(data[start : start + 2], ()), 1):
        token = self._ids.get(data[start : start + length])
        if token is not None and start + length <= size:
          break
      ids.append(token)
      start += length
    return np.array(ids, np.int32)

  def decode_bytes(self, ids: Iterable[int]) -> bytes:
    """The bytes of tokens; one that the vocabulary has not, such as 0, has none."""
    return b"".join(self._bytes.get(int(i), b"") for i in ids)

  def encode(self, text: str, special_tokens: InText = "text") -> np.ndarray:
    special.check_in_text(special_tokens)
    return self.encode_bytes(utf8(text))

  def encode_batch(self, texts: Sequence[str], special_tokens: InText = "text") -> list[np.ndarray]:
    return [self.encode(text, special_tokens) for text in texts]

  def encode_continuations(
    self, pairs: Sequence[tuple[str, str]], special_tokens: InText = "text"
  ) -> list[tuple[np.ndarray, int]]:
    found = []
    for context, text in pairs:
      ids = self.encode(context + text, special_tokens)
      ends = np.cumsum([len(self._bytes[int(i)]) for i in ids])
      found.append((ids, int(np.searchsorted(ends, len(utf8(context)), side="right"))))
    return found

  def decode(self, ids: Iterable[int]) -> str:
    return self.decode_bytes(ids).decode(errors="replace")

  def pieces(self, text: str) -> list[str]:
    return [text]

  def is_byte(self, token: int) -> bool:
    try:
      self._bytes.get(token, b"").decode()
    except UnicodeDecodeError:
      return True
    return False


def tokenizer_of(path: str | Path) -> Tokenizer:
  """The tokenizer of a file: tokenizer.json, or the `.txt` of a vocabulary of RWKV World.

  Raises:
    DataError: the file is missing or unusable.
  """
  return WorldTokenizer(path) if Path(path).suffix == ".txt" else FileTokenizer(path)


def _entry(line: str) -> tuple[int, bytes]:
  """(id, bytes) of a line; ValueError says what is wrong."""
  token, _, rest = line[: _MOST_LINE + 1].partition(" ")
  literal, _, length = rest.rpartition(" ")
  if len(line) > _MOST_LINE or not all(x.isascii() and x.isdecimal() for x in (token, length)):
    raise ValueError("an id, a literal and a length are needed")
  if not literal.startswith(_QUOTES):
    raise ValueError("the literal must be a text or bytes")
  text = ast.literal_eval(literal)
  text = text.encode() if isinstance(text, str) else text
  if not isinstance(text, bytes) or not 0 < len(text) <= _LONGEST:
    raise ValueError(f"the literal must be 1 to {_LONGEST} bytes")
  if len(text) != int(length) or not 0 < int(token) < _MOST_TOKENS:
    raise ValueError(f"it has {len(text)} bytes, and ids are 1 to {_MOST_TOKENS - 1}")
  return int(token), text
