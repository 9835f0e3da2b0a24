"""Measurements as rows of a CSV file, which `--keep` continues."""

import csv
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path


def _line(values) -> str:
  return "  ".join(str(value) or "-" for value in values)


def read(table: Path, *, without: Collection[str], column: str = "scan") -> list[dict]:
  """The rows of a file, if there is one, but those that have one of `without` in the column."""
  if not table.exists():
    return []
  with table.open() as file:
    return [row for row in csv.DictReader(file) if row.get(column) not in without]


def write(table: Path, fields: Sequence[str], rows: list[dict]):
  """Replaces the file."""
  with table.open("w", newline="") as file:
    writer = csv.DictWriter(file, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def add(rows: list[dict], row: Mapping, fields: Sequence[str], file: Path | None, line=_line):
  """Appends a row, prints it, and replaces the file at once: a later failure loses nothing."""
  rows.append({field: row.get(field, "") for field in fields})
  print(line(rows[-1].values()), flush=True)
  if file:
    write(file, fields, rows)
