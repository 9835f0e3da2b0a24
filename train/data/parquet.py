"""Rows of Parquet files, read a few at a time, by the package pyarrow."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lnssm_jax.files.reading import open_regular
from train.data.compressed import Limit
from train.data.errors import DataError, reading

ROWS = 32  # read at once: equal long texts take little room in a file, but not in memory


def read(path: Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
  """Yields each row, as a dictionary.

  Args:
    columns: those that are read; None: all.

  Raises:
    DataError: the file is damaged, lacks a column, or expands beyond `Limit`; or pyarrow is not
      installed.
  """
  try:
    import pyarrow
    from pyarrow import parquet
  except ImportError:
    raise DataError(f"{path} needs the package pyarrow: pip install pyarrow") from None
  with _errors(path, pyarrow.ArrowException), open_regular(path, follow_links=True) as raw:
    size = os.fstat(raw.fileno()).st_size
    file = parquet.ParquetFile(raw)
    for column in columns or ():
      if column not in file.schema_arrow.names:
        raise DataError(
          f'{path} has the columns {file.schema_arrow.names}, but not "{column}". Names of other'
          " columns are settings: data.fields, or --fields."
        )
    chosen = None if columns is None else list(columns)
    # Pages are expanded whole: their sizes are in the file, and checked before.
    wanted = [
      i for i, name in enumerate(file.schema_arrow.names) if chosen is None or name in chosen
    ]
    groups = range(file.metadata.num_row_groups)
    pages, limit = Limit(path, size), Limit(path, size)
    for group in map(file.metadata.row_group, groups):
      flat = group.num_columns == len(file.schema_arrow.names)
      parts = wanted if flat else range(group.num_columns)
      pages.count(sum(group.column(i).total_uncompressed_size for i in parts))
    for batch in file.iter_batches(batch_size=ROWS, columns=chosen):
      limit.count(batch.nbytes)
      yield from batch.to_pylist()


@contextlib.contextmanager
def _errors(path: Path, of_arrow: type[Exception]) -> Iterator[None]:
  """Converts errors of pyarrow, which are partly OSErrors, to DataError."""
  try:
    with reading(path):
      yield
  except of_arrow as error:
    raise DataError(f"{path} is damaged or not Parquet: {error}. Copy it again.") from error
