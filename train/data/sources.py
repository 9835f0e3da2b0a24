"""Reading documents from text sources: files, folders, globs, Python's standard library.

A source is one of

    a file        .txt, other text, or a name without an ending: one document; .jsonl: one document
                  per row, under "text", or under the names that `read_inputs` is given; either may
                  be compressed as .gz, .xz or .zst. .parquet: a row is one of .jsonl
    a folder      all text, .jsonl, .parquet and source-code files in it, recursively
    a glob        "logs/**/*.txt"
    python-stdlib the .py files of the running Python's standard library; "python-stdlib:train"
                  and "python-stdlib:validation" are disjoint splits of it

`~` and environment variables (`$NAME`) in paths are expanded. A file given by its path must be
valid UTF-8; an invalid file found in a folder or by a glob is skipped and counted. Empty documents
are always skipped and counted.
"""

import glob
import hashlib
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lnssm_jax.files.checked_json import parse
from train.data import compressed, parquet
from train.data.compressed import MAX_ROW
from train.data.errors import DataError, reading

STDLIB = "python-stdlib"
STDLIB_VALIDATION = 0.05  # fraction of the files
STDLIB_BYTES = 16_000_000  # limit, so that tokenizing it takes seconds
# Character tables, help texts and tools: not typical programs.
STDLIB_SKIP = {"encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "turtledemo"}
TEXT = (
  ".c .cc .cfg .cpp .cu .cuh .go .h .hpp .html .ini .java .js .json .md .py .pyi .rs .rst .sh .tex"
  " .toml .ts .txt .yaml .yml"
)
TEXT_SUFFIXES = frozenset(TEXT.split())
PARQUET = ".parquet"
ROWS = (".jsonl", PARQUET)
SUPPORTED = f".parquet, .jsonl {TEXT}; all but .parquet also as {' '.join(compressed.SUFFIXES)}"
TEXT_FIELDS = ("text",)
SKIP_FOLDERS = {"__pycache__", "node_modules", "site-packages", "dist-packages"}


class Input(NamedTuple):
  """One file to read; `named` if the user gave its path rather than its folder."""

  path: Path
  named: bool


class Document(NamedTuple):
  """A text; its first `prompt` characters are a prompt, or its targets are at `places`."""

  text: str
  prompt: int = 0
  places: tuple[tuple[int, int], ...] | None = None  # of a conversation


# (a row that has messages; its place for errors) -> its document, or those of both answers
type Chat = Callable[[Any, str], Iterable[Document]]


def find_inputs(source: str) -> list[Input]:
  """Finds the files of `source`, in an order that depends only on their names.

  Raises:
    DataError: there are no files, or none of a supported kind.
  """
  if source == STDLIB or source.startswith(STDLIB + ":"):
    return [Input(path, named=False) for path in _stdlib_files(source)]
  expanded = os.path.expanduser(os.path.expandvars(source))
  if not expanded:
    raise DataError("the source is empty; use the path of a file or a folder, or a glob.")
  path = Path(expanded)
  with reading(path):
    if (missing := re.search(r"\$\{?(\w+)\}?", expanded)) and not path.exists():
      raise DataError(f"{source!r} needs the environment variable {missing[1]}, which is not set.")
    if path.is_file():
      if not _is_text(path) and _suffix(path):
        raise DataError(f"{path} is not a supported kind of text; supported are {SUPPORTED}.")
      return [Input(path, named=True)]
    if path.is_dir():
      found = _walk(path)
    else:
      if not glob.has_magic(expanded):
        raise DataError(f"there is no file or folder {source!r} to read text from.")
      found = [Path(p) for p in sorted(glob.glob(expanded, recursive=True))]
      found = [p for p in found if p.is_file() and _is_text(p)]
  if not found:
    raise DataError(f"{source!r} has no text; supported are files that end in {SUPPORTED}.")
  return [Input(p, named=False) for p in found]


def fingerprint(inputs: Sequence[Input]) -> str:
  """Digest of the paths, sizes and modification times of `inputs`."""
  digest = hashlib.sha256()
  for path, _ in inputs:
    with reading(path):
      stat = path.stat()
    digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
  return digest.hexdigest()


def read_documents(
  source: str, skipped: Counter[str] | None = None, fields: Sequence[str] = TEXT_FIELDS
) -> Iterator[str]:
  """Yields the documents of `source` that are not empty.

  Args:
    source: see the module's docstring.
    skipped: counter of skipped documents, under "empty" and "undecodable".
    fields: see `read_inputs`.

  Raises:
    DataError: nothing to read, or an unreadable row or named file; the message names the file and
      the line.
  """
  found = read_inputs(find_inputs(source), Counter() if skipped is None else skipped, fields)
  return (document.text for document in found)


def read_inputs(
  inputs: list[Input],
  skipped: Counter[str],
  fields: Sequence[str] = TEXT_FIELDS,
  chat: Chat | None = None,
) -> Generator[Document, None, None]:
  """As `read_documents`, with prompts, for the files that `find_inputs` returned.

  Args:
    fields: keys of a row: that of the text, those of a prompt and its completion, or those of a
      prompt and two answers, each of which makes a document. A row whose text, or completion, is
      empty is skipped; an empty answer of two is an error.
    chat: makes the documents of a row of messages; one without a reply is skipped.
  """
  for path, named in inputs:
    if not has_rows(path) and (len(fields) > 1 or chat is not None):
      raise DataError(
        f"{path} has no rows with {' and '.join(map(repr, fields))}; use .jsonl or .parquet files."
      )
    rows = has_rows(path)
    for document in _rows(path, fields, chat) if rows else _whole(path, named, skipped):
      if len(document.text) > document.prompt and document.places != ():
        yield document
      else:
        skipped["empty"] += 1


def is_plain(path: Path) -> bool:
  """Whether a file is text as it is, neither compressed nor Parquet."""
  return compressed.plain(path) == path and _suffix(path) != PARQUET


def has_rows(path: Path) -> bool:
  """Whether a file has rows rather than one text."""
  return _suffix(path) in ROWS


def _suffix(path: Path) -> str:
  return compressed.plain(path).suffix.lower()


def _is_text(path: Path) -> bool:
  return _suffix(path) in TEXT_SUFFIXES or has_rows(path)


def _walk(root: Path, skip: frozenset[str] | set[str] = frozenset()) -> list[Path]:
  """Text files below `root`, except hidden ones, sorted by relative path."""
  found = []
  for folder, inner, names in os.walk(root, onerror=_raise):
    inner[:] = [d for d in inner if d not in SKIP_FOLDERS | skip and not d.startswith(".")]
    paths = (Path(folder, name) for name in names if not name.startswith("."))
    found += [path for path in paths if _is_text(path) and path.is_file()]
  return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _raise(error: OSError) -> None:
  raise error


def _stdlib_files(source: str) -> list[Path]:
  """Sources of the standard library, in the deterministic order of a hash of their names."""
  parts = (STDLIB, f"{STDLIB}:train", f"{STDLIB}:validation")
  if source not in parts:
    raise DataError(f"there is no source {source!r}; use one of {', '.join(map(repr, parts))}.")
  root = Path(sysconfig.get_path("stdlib"))
  ranked = []
  for path in _walk(root, STDLIB_SKIP | {"test", "tests"}):
    name = path.relative_to(root).as_posix()
    if path.suffix == ".py" and not name.startswith("config-"):
      ranked.append((int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) / 2**32, name, path))
  ranked.sort()
  kept, room = {part: [] for part in parts}, STDLIB_BYTES
  for rank, _, path in ranked:
    room -= path.stat().st_size
    if room >= 0:
      kept[parts[0]].append(path)
      kept[parts[2] if rank < STDLIB_VALIDATION else parts[1]].append(path)
  if not kept[source]:
    raise DataError(
      f"the standard library of this Python has no sources in {root}; use a folder of text in"
      " data.sources instead."
    )
  return kept[source]


def _whole(path: Path, named: bool, skipped: Counter[str]) -> Iterator[Document]:
  """Yields the document of a text file."""
  try:
    with reading(path), compressed.open_text(path) as file:
      yield Document(file.read().decode("utf-8-sig"))
  except UnicodeDecodeError as error:
    if named:
      raise DataError(f"{path}: {_position(error)}. Convert the file to UTF-8.") from error
    skipped["undecodable"] += 1
  except compressed.Damaged as error:
    raise DataError(f"{path} is damaged or not {path.suffix}: {error}. Copy it again.") from error


def _rows(path: Path, fields: Sequence[str], chat: Chat | None) -> Iterator[Document]:
  """Yields the documents of a file of rows."""
  for where, row in read_rows(path, None if chat else fields, strict=False):
    if chat is not None:
      yield from chat(row, where)
      continue
    *prompt, text = (text_in(row, where, key) for key in fields[:2])
    before = "".join(prompt)
    answers = [text, *(text_in(row, where, key) for key in fields[2:])]
    for key, answer in zip(fields[1:], answers, strict=False) if len(answers) > 1 else ():
      if not answer:
        raise DataError(f'{where}: "{key}" is empty, but a pair has two answers; remove the row.')
    for answer in answers:
      yield Document(before + answer, len(before))


def read_rows(
  path: Path, columns: Sequence[str] | None = None, *, strict: bool = True
) -> Iterator[tuple[str, Any]]:
  """Yields each row of a file of rows, after its place for messages.

  Args:
    columns: those of .parquet that are read; None: all.
    strict: as of `checked_json.parse`.

  Raises:
    DataError: the file or a row is unreadable; the message names the file and the line.
  """
  number = 0
  if _suffix(path) == PARQUET:
    for number, row in enumerate(parquet.read(path, columns), 1):
      yield f"{path}, row {number}", row
    return
  try:
    with reading(path), compressed.open_text(path) as file:
      for number, line in enumerate(iter(lambda: file.readline(MAX_ROW), b""), 1):
        if len(line) == MAX_ROW:
          raise DataError(
            f"{path}, line {number}: longer than {MAX_ROW} bytes; each line must be one row."
          )
        if text := line.removeprefix(b"\xef\xbb\xbf").strip():
          where = f"{path}, line {number}"
          yield where, _parsed(text, where, strict)
  except compressed.Damaged as error:
    raise DataError(
      f"{path}, after line {number}: damaged or not {path.suffix}: {error}. Copy it again."
    ) from error


def _parsed(line: bytes, where: str, strict: bool) -> Any:
  try:
    return parse(line, strict=strict)
  except ValueError as error:
    raise DataError(f'{where}: {error}. A row is an object, such as {{"text": ...}}.') from error


def value_in(row: Any, where: str, key: str, note: str = "") -> Any:
  """Value of `key` in one row; `note` ends the error."""
  if not isinstance(row, dict) or key not in row:
    found = (
      f"the keys {sorted(map(str, row))!r:.200}" if isinstance(row, dict) else type(row).__name__
    )
    raise DataError(
      f'{where}: found {found}, expected an object with the key "{key}". Names of other keys are'
      f" settings: data.fields, or tokenize --fields.{note}"
    )
  return row[key]


def text_in(row: Any, where: str, key: str) -> str:
  """Text of `key` in one row."""
  is_chat = isinstance(row, dict) and "messages" in row
  chat = " Conversations need data.targets: assistant." if is_chat else ""
  text = value_in(row, where, key, chat)
  if not isinstance(text, str):
    raise DataError(f'{where}: "{key}" is {type(text).__name__}, expected a string.')
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise DataError(
      f"{where}: the text has an unpaired surrogate at character {error.start}, which cannot be"
      " encoded. Replace it."
    ) from error
  return text


def _position(error: UnicodeDecodeError) -> str:
  return f"not UTF-8 at byte {error.start} (0x{error.object[error.start]:02x})"
