"""The progress of reading text."""

import dataclasses
import time
from collections import Counter
from typing import TextIO

from train.messages import write


@dataclasses.dataclass
class Progress:
  """Progress line: overwritten in place on a terminal, else printed every 10 seconds."""

  title: str
  out: TextIO | None  # None: only count
  documents: int = 0
  bytes: int = 0

  def __post_init__(self):
    self.started = self.shown = time.monotonic()
    self.live = self.out is not None and self.out.isatty()

  def add(self, size: int) -> None:
    self.documents += 1
    self.bytes += size
    now = time.monotonic()
    if self.out and now - self.shown >= (0.2 if self.live else 10.0):
      self.shown = now
      self._show(end="" if self.live else "\n")

  def close(self, skipped: Counter[str] | None = None) -> None:
    dropped = "".join(f", {count} {why} skipped" for why, count in (skipped or {}).items())
    if self.out:
      self._show(dropped + "\n")

  def _show(self, end: str) -> None:
    seconds = max(time.monotonic() - self.started, 1e-3)
    megabytes = self.bytes / 1e6
    start = "\r" if self.live else ""
    line = (
      f"{start}{self.title}: {self.documents} documents, {megabytes:.1f} MB,"
      f" {megabytes / seconds:.1f} MB/s{end}"
    )
    write(self.out, line)
