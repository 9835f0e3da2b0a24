"""Rows of a task's .jsonl files, read with checks, and rows to train on, written."""

import json
import reprlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from lnssm_jax.files.atomic import replace_file
from train.data.errors import DataError, writing
from train.data.sources import find_inputs, has_rows, read_rows

# Rows in messages: an empty value is seen, a text not as a whole.
_SHORT = reprlib.Repr(maxstring=30, maxdict=20, maxlist=4)


def read_samples(
  source: str, wrong: Callable[[dict[str, Any]], str | None], limit: int | None = None
) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
  """Yields each .jsonl or .parquet file of a path, folder or glob with its first `limit` rows.

  Args:
    wrong: says what a row of another format should have; None for a row that is right.

  Raises:
    DataError: there is no such file, it is empty, or a row is of another format.
  """
  paths = [path for path, _ in find_inputs(source) if has_rows(path)]
  if not paths:
    raise DataError(f"{source} has no .jsonl file; a task reads one row of JSON per line.")
  for path in paths:
    rows = []
    for where, row in read_rows(path):
      missing = wrong(row if isinstance(row, dict) else {})
      if missing is not None:
        raise DataError(f"{where}: found {_SHORT.repr(row)}, expected {missing}.")
      rows.append(row)
      if len(rows) == limit:
        break
    if not rows:
      raise DataError(f"{path} has no rows.")
    yield path, rows


def write_training_rows(path: Path, rows: Iterable[tuple[str, str]]) -> int:
  """Writes rows {"prompt", "completion"}, which `train tokenize` reads; returns their number.

  Nothing is written if one of the rows, which may be read one by one, raises.

  Raises:
    DataError: the file cannot be written.
  """
  found = [{"prompt": prompt, "completion": completion} for prompt, completion in rows]
  write_rows(path, found)
  return len(found)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
  """Writes or replaces a .jsonl file, atomically.

  Raises:
    DataError: the file cannot be written.
  """
  content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
  with writing(path):
    replace_file(path, content)
