"""The result of a task: settings and tables, as text and as JSON."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lnssm_jax.files.atomic import write_output

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Report:
  """The result of a task.

  Attributes:
    task: its name.
    settings: what the numbers depend on.
    tables: rows by the table's name; the rows of a table have the same keys.
    details: further tables, in the JSON only.
    draw: draws the result to a file; of tasks with the option `--plot`.
  """

  task: str
  settings: Mapping[str, Any]
  tables: Mapping[str, Sequence[Row]]
  details: Mapping[str, Sequence[Row]] = dataclasses.field(default_factory=dict)
  draw: Callable[[Path], object] | None = None

  def text(self) -> str:
    """The tables, with a line of settings above."""
    known = ((name, value) for name, value in self.settings.items() if value is not None)
    lines = [", ".join([self.task, *(f"{name} {_shown(value)}" for name, value in known)])]
    for name, rows in self.tables.items():
      lines += ["", name, *_table(rows)]
    return "\n".join(lines)

  def write(self, path: str | Path) -> None:
    """Writes everything as one JSON object."""
    content = {"task": self.task, "settings": self.settings, **self.tables, **self.details}
    write_output(path, f"{json.dumps(content, indent=2)}\n".encode())


def _shown(value: Any) -> str:
  """Numbers with four digits, lists with commas, a missing value as a dash."""
  if value is None:
    return "-"
  if isinstance(value, float):
    return f"{value:.4g}" if abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:.4f}"
  if isinstance(value, list | tuple):
    return ",".join(map(_shown, value))
  return f"{value:,}" if type(value) is int else str(value)


def _table(rows: Sequence[Row]) -> list[str]:
  """A header and the rows, columns aligned: text to the left, numbers to the right."""
  if not rows:
    return ["  (empty)"]
  names = list(rows[0])
  cells = [names, *([_shown(row[name]) for name in names] for row in rows)]
  columns = []
  for number, name in enumerate(names):
    column = [line[number] for line in cells]
    width = max(map(len, column))
    is_text = any(isinstance(row[name], str) for row in rows)
    columns.append([cell.ljust(width) if is_text else cell.rjust(width) for cell in column])
  return ["  " + "  ".join(line).rstrip() for line in zip(*columns, strict=True)]
