"""Tokenizers of models: raw bytes, or any `tokenizer.json` (with the package `tokenizers`)."""

import functools
import hashlib
import json
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lnssm_jax.files.checked_json import parse
from lnssm_jax.files.reading import DataError, read_bytes, reading
from lnssm_jax.pretrained import special_tokens as special
from lnssm_jax.pretrained import tokenizer_json
from lnssm_jax.pretrained.special_tokens import Added, InText

END_OF_TEXT = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")
PIECE = 1 << 14  # characters after which a long text is split at the next safe position
_MAX_FILE = 1 << 28  # bytes of a tokenizer.json
_FILE = "tokenizer.json"


class Tokenizer(Protocol):
  """Interface of a tokenizer.

  Attributes:
    spec: its name or path, as in `data.tokenizer`.
    fingerprint: equal only for tokenizers that produce equal ids.
    vocab_size: one more than the largest id.
    end_of_text: the id that ends every document.
    added: ids put before and after a whole text (`encode_whole`).
  """

  spec: str
  fingerprint: str
  vocab_size: int
  end_of_text: int
  added: Added

  def encode(self, text: str, special_tokens: InText = "text") -> np.ndarray:
    """Returns int32 [tokens], without those put around a whole text.

    Args:
      special_tokens: whether a special token spelled out in `text` is one token ("parse") or
        ordinary text ("text").
    """
    ...

  def encode_batch(self, texts: Sequence[str], special_tokens: InText = "text") -> list[np.ndarray]:
    """Encodes each text, in parallel if the tokenizer can."""
    ...

  def encode_continuations(
    self, pairs: Sequence[tuple[str, str]], special_tokens: InText = "text"
  ) -> list[tuple[np.ndarray, int]]:
    """Encodes context and text of each pair as the one text that they are.

    Returns:
      (int32 [tokens], how many of them have no character of the text) of each. A token that has
      characters of both counts as one of the text.
    """
    ...

  def decode(self, ids: Iterable[int]) -> str:
    """Text of `ids`, without end-of-text; bytes that are not UTF-8 become U+FFFD."""
    ...

  def pieces(self, text: str) -> list[str]:
    """Splits `text` such that the concatenated tokens of the pieces are the tokens of `text`."""
    ...

  def is_byte(self, token: int) -> bool:
    """Whether the text of a token may change with those next to it: a byte of several."""
    ...


class ByteTokenizer:
  """Ids 0 to 255 are UTF-8 bytes, 256 is end-of-text, which no text spells out."""

  spec = fingerprint = "bytes"
  vocab_size = 257
  end_of_text = 256
  added = Added()

  def encode(self, text: str, special_tokens: InText = "text") -> np.ndarray:
    special.check_in_text(special_tokens)
    return np.frombuffer(utf8(text), np.uint8).astype(np.int32)

  def encode_batch(self, texts: Sequence[str], special_tokens: InText = "text") -> list[np.ndarray]:
    return [self.encode(text, special_tokens) for text in texts]

  def encode_continuations(
    self, pairs: Sequence[tuple[str, str]], special_tokens: InText = "text"
  ) -> list[tuple[np.ndarray, int]]:
    encode = lambda text: self.encode(text, special_tokens)
    return [(encode(context + text), len(utf8(context))) for context, text in pairs]

  def decode(self, ids: Iterable[int]) -> str:
    return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")

  def pieces(self, text: str) -> list[str]:
    return [text]

  def is_byte(self, token: int) -> bool:
    return False  # incomplete characters become U+FFFD, and nothing else changes


class FileTokenizer:
  """Tokenizer of a `tokenizer.json`, without truncation, padding and the dropout of merges.

  `added` is what its post-processor and a tokenizer_config.json next to it put around a text.
  Dropout of merges, with which one text would have several encodings, is switched off.

  Args:
    end_of_text: the token that ends a text, or its id; None looks for one of `END_OF_TEXT`.
    added: the ids around a text, in place of those of the files.
    raw: the content, of a `path` that is no such file itself.

  Raises:
    DataError: a file is missing or unusable, or has no such token.
  """

  def __init__(
    self,
    path: str | Path,
    spec: str | None = None,
    *,
    follow_links: bool = True,
    end_of_text: int | str | None = None,
    added: Added | None = None,
    raw: bytes | None = None,
  ):
    self._path = path = Path(path)
    self.spec = spec or str(path)
    if raw is None:
      if path.is_dir():
        raise DataError(f"the tokenizer {path} is a folder; use the tokenizer.json in it.")
      with reading(path):
        raw = read_bytes(path, _MAX_FILE, follow_links=follow_links)
    package = _import_tokenizers(path)
    with _library(f"{path} is not a tokenizer.json"):
      settings = parse(raw, strict=False)
      tokenizer_json.check_size(settings)
      self._load = lambda: _loaded(package, raw)
      inner = self._load()
      inner.encode_special_tokens = True
      self._can_split = tokenizer_json.can_split_before_newline(settings)
      id_of = inner.get_vocab()
      self._bytes = {id_of[name] for name in tokenizer_json.byte_tokens(settings) if name in id_of}
    if added is None:
      config = _settings_next_to(path, follow_links)
      special.check_known(config, id_of, path)
      added = special.added_by(settings.get("post_processor"), config, id_of, path)
    self.raw = raw  # content of the file
    self.folder = path if path.is_dir() else path.parent
    self.added = added
    self.vocab_size = 1 + max((*id_of.values(), *added.before, *added.after), default=0)
    usual = next((id_of[end] for end in END_OF_TEXT if end in id_of), None)
    end = usual if end_of_text is None else end_of_text
    if isinstance(end, str):
      end = id_of.get(end)
      if end is None:
        raise DataError(f"{path} has no token {end_of_text!r} to end a text; name one that it has.")
    if end is None:
      raise DataError(
        f"{path} has no end-of-text token; none of {', '.join(END_OF_TEXT)} is in its vocabulary."
        " Name the token by data.end_of_text."
      )
    self.end_of_text: int = end
    self.named_end = None if end == usual else inner.id_to_token(end)
    # Another end, or other tokens around a text, give other ids.
    others = (b"" if end == usual else b"%d" % end) + (repr(added).encode() if any(added) else b"")
    self.fingerprint = hashlib.sha256(raw + others).hexdigest()
    self._inner = inner

  def __reduce__(self):
    """Pickles the content of the file, not the package's tokenizer, which would lose its flags."""
    how = {"end_of_text": self.end_of_text, "added": self.added, "raw": self.raw}
    return functools.partial(FileTokenizer, self._path, self.spec, **how), ()

  def encode(self, text: str, special_tokens: InText = "text") -> np.ndarray:
    parts = self.encode_batch(self.pieces(text), special_tokens)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)

  def encode_batch(self, texts: Sequence[str], special_tokens: InText = "text") -> list[np.ndarray]:
    for text in texts:
      utf8(text)
    inner = self._encoder(special_tokens)
    with _library(f"the tokenizer {self.spec} cannot encode a text"):
      found = inner.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array(encoding.ids, np.int32) for encoding in found]

  def encode_continuations(
    self, pairs: Sequence[tuple[str, str]], special_tokens: InText = "text"
  ) -> list[tuple[np.ndarray, int]]:
    rows = [self.pieces(context + text) for context, text in pairs]
    tokens = iter(self.encode_batch([piece for row in rows for piece in row], special_tokens))
    parts = [[next(tokens) for _ in row] for row in rows]
    # The piece of each row with the boundary, and the place of the boundary in it.
    cut: list[tuple[int, int]] = []
    for (context, _), row in zip(pairs, rows, strict=True):
      number, place = 0, len(context)
      while number < len(row) - 1 and place >= len(row[number]):
        number, place = number + 1, place - len(row[number])
      cut.append((number, place))
    inner = self._encoder(special_tokens)
    with _library(f"the tokenizer {self.spec} cannot encode a text"):
      texts = [row[number] for row, (number, _) in zip(rows, cut, strict=True)]
      encodings = inner.encode_batch(texts, add_special_tokens=False)
    found = []
    for pair, part, (number, place), encoding in zip(pairs, parts, cut, encodings, strict=True):
      start = _first_beyond(encoding.offsets, place, *pair)
      found.append((np.concatenate(part), sum(map(len, part[:number])) + start))
    return found

  def encode_places(
    self, text: str, places: Sequence[tuple[int, int]]
  ) -> tuple[np.ndarray, np.ndarray]:
    """Encodes a text whose special tokens are one token each.

    Args:
      places: [begin, end) of characters, ascending.

    Returns:
      (int32 [tokens], bool [tokens]: those with a character in one of the places).
    """
    with _library(f"the tokenizer {self.spec} cannot encode a text"):
      encoding = self._parser.encode(text, add_special_tokens=False)
    begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    chosen = np.zeros(len(begins), bool)
    for begin, end in places:
      chosen |= (ends > begin) & (begins < end)
    return np.array(encoding.ids, np.int32), chosen

  def names_of(self, ids: Iterable[int]) -> list[str]:
    """The texts of special tokens, each once, of those that it has."""
    found = (self._inner.id_to_token(i) for i in dict.fromkeys(ids))
    return [name for name in found if name is not None]

  def has(self, token: str) -> bool:
    """Whether the vocabulary has it."""
    return self._inner.token_to_id(token) is not None

  def special_in(self, text: str) -> str | None:
    """The first special token that a text spells out, if any.

    Also in another form, such as capital letters, where a normalizer makes it one.
    """
    names = (token.content for token in self._special.values())
    found = next((name for name in names if name in text), None)
    if found is None and any(token.normalized for token in self._special.values()):
      ids = self.encode(text, "parse").tolist()
      found = next((self._special[i].content for i in ids if i in self._special), None)
    return found

  @functools.cached_property
  def _special(self) -> dict[int, Any]:
    tokens = self._inner.get_added_tokens_decoder().items()
    return {i: token for i, token in tokens if token.special}

  def decode(self, ids: Iterable[int]) -> str:
    end = self.end_of_text
    kept = [i for i in map(int, ids) if i != end]
    with _library(f"the tokenizer {self.spec} cannot decode"):
      return self._inner.decode(kept, skip_special_tokens=False)

  def pieces(self, text: str) -> list[str]:
    if not self._can_split:
      return [text]
    return list(split(text))

  def is_byte(self, token: int) -> bool:
    return token in self._bytes

  @property
  def standalone(self) -> bytes:
    """The content of a tokenizer.json that puts `added` around a text without other files."""
    settings = parse(self.raw, strict=False)
    if special.added_by(settings.get("post_processor"), {}, {}, Path(self.spec)) == self.added:
      return self.raw
    names = {i: self._inner.id_to_token(i) for part in self.added for i in part}
    settings["post_processor"] = special.post_processor(self.added, names)
    return json.dumps(settings, ensure_ascii=False, indent=2).encode()

  def _encoder(self, special_tokens: InText) -> Any:
    special.check_in_text(special_tokens)
    return self._parser if special_tokens == "parse" else self._inner

  @functools.cached_property
  def _parser(self) -> Any:
    """The tokenizer for which special tokens in a text are tokens: the flag is not of a call."""
    with _library(f"{self.spec} is not a tokenizer.json"):
      return self._load()


def encode_whole(tokenizer: Tokenizer, text: str, special_tokens: InText = "parse") -> np.ndarray:
  """Tokens of a whole text as the tokenizer's own files encode it: with those put around it."""
  before, after = tokenizer.added
  return np.array([*before, *tokenizer.encode(text, special_tokens), *after], np.int32)


def _first_beyond(places: Sequence[tuple[int, int]], boundary: int, before: str, text: str) -> int:
  """Number of the first token with a character of `text`, which begins at a boundary.

  A normalizer may compose its first character with the last one before it, whose place the token
  has then.
  """
  first = next((n for n, (_, end) in enumerate(places) if end > boundary), len(places))
  if (before and text) and (first == len(places) or places[first][0] > boundary):
    pair = before[-1] + text[0]
    if unicodedata.combining(text[0]) or len(unicodedata.normalize("NFC", pair)) < len(pair):
      return next((n for n, (_, end) in enumerate(places) if end >= boundary), first)
  return first


def split(text: str) -> Iterator[str]:
  """Pieces of at least PIECE characters; see `tokenizer_json.can_split_before_newline`."""
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


def _loaded(package: Any, raw: bytes) -> Any:
  """The package's tokenizer of a file, which adds no tokens and gives one encoding of a text."""
  inner = package.Tokenizer.from_buffer(raw)
  inner.no_truncation()
  inner.no_padding()
  inner.post_processor = None  # it would also trim the places of tokens in a text
  for name in ("dropout", "alpha", "nbest_size"):  # of BPE, of Unigram
    if getattr(inner.model, name, None) is not None:
      setattr(inner.model, name, None)
  return inner


def _settings_next_to(path: Path, follow_links: bool) -> Mapping[str, Any]:
  """Settings of the folder of a tokenizer.json, or of a folder that stands for one."""
  if path.is_dir():
    return special.read_settings(path, follow_links=follow_links)
  return special.read_settings(path.parent, follow_links=follow_links) if path.name == _FILE else {}


@contextmanager
def _library(failed: str) -> Iterator[None]:
  """Converts errors of the library to DataError: bare Exceptions, and panics (BaseException)."""
  try:
    yield
  except (KeyboardInterrupt, SystemExit):
    raise
  except BaseException as error:
    panic = "" if isinstance(error, Exception) else " (the lines before this one are the package's)"
    raise DataError(f"{failed}: {error}{panic}.") from error


def utf8(text: str) -> bytes:
  """The bytes of a text; DataError for one with a surrogate that has no pair."""
  try:
    return text.encode()
  except UnicodeEncodeError as error:
    raise DataError(
      f"the text has an unpaired surrogate at character {error.start}, which cannot be encoded."
      " Replace it."
    ) from error
