"""Continuations of many prompts: a file of rows in, the same rows with the new text out.

OUTPUT.partial   a line of what they depend on, then a row for each prompt that is done
OUTPUT           the rows, once all are there
"""

import dataclasses
import fcntl
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from lnssm_jax.files.atomic import append_to, named, replace_file, write_all
from lnssm_jax.files.checked_json import parse
from lnssm_jax.files.reading import DataError
from lnssm_jax.mixers.common.checks import check_positive
from lnssm_jax.pretrained import texts
from lnssm_jax.pretrained.loaded import LoadedModel
from lnssm_jax.sampling import SamplingOptions
from train.data.sources import read_rows
from train.logging.console import duration
from train.messages import write as write_line

NEW = "generated"  # the key of the new text
_DEFAULTS = {"batch": 16, "until": (), "special_tokens": "parse"}


def write(
  loaded: LoadedModel,
  prompts: str | Path,
  output: str | Path,
  options: SamplingOptions,
  *,
  ema: bool = False,
  **how: Any,
) -> int:
  """Continues the "prompt" of each row of a file; returns their number.

  The rows of `output` are those of the file, in order, with the new text as "generated". A process
  that was ended is continued by the same call, after the rows that are in OUTPUT.partial.

  Args:
    prompts: a file of rows of JSON, or .parquet, as training text.
    ema: whether the model is an average, of which the partial file keeps a record.
    how: `batch`, `until` and `special_tokens` of `texts.complete_each`.

  Raises:
    DataError: `output` exists, a row has no prompt, or OUTPUT.partial is damaged, or of other
      prompts, another model or other options.
    ValueError: `batch` is not positive.
    OSError: a file cannot be read or written.
  """
  how, output = _DEFAULTS | how, Path(output)
  check_positive("batch", how["batch"])
  _check_new(output)
  rows = _rows(Path(prompts))
  kept = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
  about = {"model": str(loaded.source), "step": loaded.step, "ema": ema, "rows": kept}
  about |= dataclasses.asdict(options) | {n: x for n, x in how.items() if n != "batch"}
  about = parse(json.dumps(about).encode())
  partial = output.with_name(f"{output.name}.partial")
  with named(partial):
    file = append_to(partial)
  with file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise DataError(f"{partial} is being written by another process; wait for it.") from None
    if os.path.lexists(output) and not os.fstat(file.fileno()).st_size:
      partial.unlink(missing_ok=True)  # which this process has created
    _check_new(output)  # another process may have just finished
    content = partial.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]  # the last line of a process that was ended
    os.ftruncate(file.fileno(), len(whole))
    lines = whole.splitlines()
    if not lines:
      with named(partial):
        write_all(file, _line(about))
    elif (found := _parsed(lines[0], partial)) != about:
      other = next(name for name in about if found.get(name) != about[name])
      raise DataError(
        f"{partial} has rows with another {other}: {found.get(other)!r:.80}, not"
        f" {about[other]!r:.80}; delete it to begin again, or give another --output."
      )
    for number, line in enumerate(lines[1:]):
      if not line.startswith(_line(rows[number])[:-2] if number < len(rows) else b"\n"):
        raise DataError(
          f"{partial}, line {number + 2}, does not have row {number + 1} of {prompts}; delete the"
          " file to begin again."
        )
    with named(partial):
      _continue(loaded, rows, max(0, len(lines) - 1), options, how, file)
    content = partial.read_bytes()
    replace_file(output, content[content.index(b"\n") + 1 :])
    partial.unlink()
  return len(rows)


def _check_new(output: Path) -> None:
  if os.path.lexists(output):
    raise DataError(f"--output {output} exists already; give a file that does not exist.")


def _continue(loaded, rows, done: int, options, how, file) -> None:
  """Adds the rows from number `done` on, each on disk as soon as its text is there."""
  started = shown = time.monotonic()
  given = [row["prompt"] for row in rows]
  new = texts.complete_each(loaded.model, loaded.tokenizer, given, options, first=done, **how)
  for number, text in enumerate(new, done + 1):
    write_all(file, _line(rows[number - 1] | {NEW: text}))
    now = time.monotonic()
    if number == len(rows) or now - shown >= 10:
      shown, speed = now, (number - done) / max(now - started, 1e-3)
      left = duration((len(rows) - number) / speed)
      counts = f"{number:,} of {len(rows):,} prompts"
      write_line(sys.stderr, f"{counts}, {speed:.1f} per second, {left} left\n")
  os.fsync(file.fileno())


def _rows(path: Path) -> list[dict[str, Any]]:
  rows = []
  for where, row in read_rows(path):
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
      raise DataError(
        f'{where}: expected an object with a string "prompt", such as {{"prompt": ...}}.'
      )
    if NEW in row:
      raise DataError(f'{where}: has the key "{NEW}", which is that of the new text; rename it.')
    try:
      json.dumps(row, allow_nan=False)
    except (TypeError, ValueError) as error:  # of .parquet: dates, bytes, NaN
      raise DataError(f"{where}: {error}; leave that column out, or make it text.") from None
    rows.append(row)
  if not rows:
    raise DataError(f'--prompts {path} has no rows; give some, such as {{"prompt": ...}}.')
  return rows


def _line(row: dict[str, Any]) -> bytes:
  return json.dumps(row).encode() + b"\n"


def _parsed(line: bytes, path: Path) -> dict[str, Any]:
  try:
    found = parse(line)
  except ValueError as error:
    raise DataError(f"{path}: {error}; delete it to begin again.") from None
  return found if isinstance(found, dict) else {}
