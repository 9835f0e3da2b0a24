"""metrics.jsonl of a run: rows appended whole, kept while they cannot be written, read checked."""

import contextlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from lnssm_jax.files.atomic import append_to, named, replace_file, write_all
from lnssm_jax.files.checked_json import parse
from lnssm_jax.files.reading import open_regular, retried
from train.runs.config_file import RunFolderError
from train.runs.rows import Row, wrong_row

_DAMAGED = ".damaged"  # at the end of the name: lines that were put aside


class Line(NamedTuple):
  """A line of the file: its row, or what is wrong with it."""

  number: int
  text: bytes
  row: Row | None
  wrong: str | None


class MetricsFile:
  """The rows of a run.

  Args:
    path: of the file.
    run_id: returns the id that binds rows to their run, or None.
  """

  def __init__(self, path: Path, run_id: Callable[[], str | None] = lambda: None):
    self.path, self._run_id = path, run_id
    self._unwritten = b""  # rows that could not be written yet
    self._whole: int | None = None  # bytes of the file before a row that was cut off
    # `notable`, once `keep_until` has read all rows: nobody else writes any.
    self._known: list[Row] | None = None
    self.count = 0  # rows since `keep_until`, with those that it kept

  def read(self) -> list[Row]:
    """Reads the rows, without a last line that is still being written, or that a crash cut off.

    Raises:
      RunFolderError: any other line is damaged, or of another run.
    """
    rows = []
    for line in self._lines():
      if line.row is None:
        raise RunFolderError(
          f"{self.path}, line {line.number}, is damaged ({line.wrong}); `fit` puts it aside when "
          "the run resumes, or remove that line."
        )
      rows.append(line.row)
    return rows

  def notable(self) -> list[Row]:
    """The rows that a run needs again: evaluations and skipped steps."""
    return _notable(self.read()) if self._known is None else self._known

  def append(self, rows: list[Row]) -> None:
    """Appends rows, all or none; those that do not fit on the disk are written by a later call."""
    if self._known is not None:
      self._known += _notable(rows)
    self.count += len(rows)
    self._unwritten += self._text(rows)
    self._write()

  def keep_until(
    self, step: int, say: Callable[[str], object], count: int | None = None
  ) -> list[Row]:
    """Removes the rows of later steps, and puts damaged lines aside into another file.

    Args:
      say: reports damaged lines, and lost ones.
      count: rows that there should be up to `step`; None if that is not known.

    Raises:
      OSError: the file cannot be written; then it is unchanged.
    """
    lines = list(self._lines())
    damaged = [line for line in lines if line.row is None]
    if damaged:
      aside = self.path.with_name(self.path.name + _DAMAGED)
      with named(aside), append_to(aside) as file:
        write_all(file, b"".join(line.text + b"\n" for line in damaged))
        os.fsync(file.fileno())
      first = damaged[0]
      say(
        f"line {first.number} of {self.path} is damaged ({first.wrong}); put aside into "
        f"{aside.name}" + (f" with {len(damaged) - 1} more" if len(damaged) > 1 else "")
      )
    rows = [line.row for line in lines if line.row is not None and line.row["step"] <= step]
    if count is not None and len(rows) < count:
      say(f"{self.path} has {len(rows)} rows up to step {step}, of {count}: the others are lost")
    replace_file(self.path, self._text(rows))
    self._known, self.count = _notable(rows), len(rows)
    return rows

  def sync(self) -> None:
    """Makes the rows so far durable, if they can be."""
    with contextlib.suppress(OSError), append_to(self.path) as file:
      os.fsync(file.fileno())

  def close(self) -> int:
    """Tries to write what is left; returns the number of rows that are lost."""
    self._write()
    lost, self._unwritten = self._unwritten.count(b"\n"), b""
    return lost

  def _text(self, rows: list[Row]) -> bytes:
    own = self._run_id()
    bound = {} if own is None else {"run": own}
    return b"".join(_sealed(row | bound) for row in rows)

  def _write(self) -> None:
    """Appends all that is not written yet, or nothing."""
    with contextlib.suppress(OSError):
      if self._unwritten:
        with append_to(self.path) as file:
          if self._whole is not None:
            file.truncate(self._whole)
          self._whole = os.fstat(file.fileno()).st_size
          try:
            write_all(file, self._unwritten)
            self._unwritten, self._whole = b"", None
          except OSError:
            file.truncate(self._whole)

  def _lines(self) -> Iterator[Line]:
    """Every line but the last one, if that is incomplete."""
    try:
      content = retried(self._content)
    except FileNotFoundError:
      return
    except OSError as error:
      raise RunFolderError(f"{self.path} cannot be read ({error.strerror or error}).") from error
    own, lines, sealed = self._run_id(), content.splitlines(), False
    for number, text in enumerate(lines, 1):
      try:
        row = parse(text, strict=False)  # a loss may be NaN
      except ValueError as error:
        if number == len(lines):
          return
        yield Line(number, text, None, str(error))
        continue
      wrong = wrong_row(row)
      # Older versions wrote no checksums; a result, which tables of a sweep show, comes last.
      if wrong is None and sealed and row["kind"] == "result" and "crc32" not in row:
        wrong = "it has no checksum, unlike a row before it"
      if wrong is None:
        sealed = sealed or "crc32" in row
        wrong = _unsealed(row)
      if wrong is None and row.pop("run", own) != own and own is not None:
        wrong = "a row of another run"
      yield Line(number, text, None if wrong else row, wrong)

  def _content(self) -> bytes:
    with open_regular(self.path) as file:
      return file.read()


def _sealed(row: Row) -> bytes:
  """The line of a row, with a checksum of its other columns."""
  return json.dumps(row | {"crc32": _checksum(row)}).encode() + b"\n"


def _unsealed(row: Row) -> str | None:
  """Removes the checksum of a row; says if it is wrong. Older versions wrote none."""
  found = row.pop("crc32", None)
  return None if found in (None, _checksum(row)) else "its checksum is of other numbers"


def _checksum(row: Row) -> int:
  return zlib.crc32(json.dumps(row).encode())


def _notable(rows: list[Row]) -> list[Row]:
  return [row for row in rows if row["kind"] in ("eval", "skipped")]
