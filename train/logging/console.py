"""The progress of a run on a terminal or in a log file."""

import sys
from typing import TextIO

from lnssm_jax.files.printable import printable
from train.messages import write
from train.runs.rows import Row


class Console:
  """Prints to a terminal, where the progress line overwrites itself, or to a log line by line."""

  def __init__(self, stream: TextIO | None = None, *, quiet: bool = False):
    self._stream, self._quiet = stream or sys.stdout, quiet
    self._rewrites = self._stream is not None and self._stream.isatty()
    self._open = False  # the last output is a progress line without a line feed

  def say(self, text: str) -> None:
    """Prints a permanent line."""
    self._write(("\n" if self._open else "") + printable(text, keep="\n\t") + "\n")
    self._open = False

  def progress(self, text: str) -> None:
    """Prints a line that the next progress line replaces, on a terminal."""
    self._write(f"\r\x1b[K{text}" if self._rewrites else text + "\n")
    self._open = self._rewrites

  def _write(self, text: str) -> None:
    if not self._quiet:
      write(self._stream, text)


def train_line(row: Row, steps: int, seconds_left: float) -> str:
  """Progress line of a training row of metrics.jsonl."""
  bits = f"  {row['bits_per_byte']:.3f} bits/byte" if row["bits_per_byte"] is not None else ""
  preferred = _preferred(row)
  aux = f"  aux {row['aux_loss']:.4f}" if "aux_loss" in row else ""
  mfu = f"  mfu {row['mfu']:.1%}" if row["mfu"] is not None else ""
  slow = f"  waiting for data {row['data_wait']:.0%}" if row["data_wait"] >= 0.1 else ""
  skipped = f"  {row['skipped']} skipped" if row["skipped"] else ""
  peak = row["peak_memory"]
  memory = f"  {peak / 2**30:.1f} GiB" if peak is not None else ""
  return (
    f"step {row['step']:>{len(str(steps))}}/{steps}  loss {row['loss']:.4f}{bits}{preferred}{aux}"
    f"  {short(row['tokens_per_second'])} tokens/s{mfu}{memory}  lr {row['learning_rate']:.2e}"
    f"{slow}{skipped}  eta {duration(seconds_left)}"
  )


def eval_line(row: Row) -> str:
  """Line for the evaluation of one set."""
  bits = f"  {row['bits_per_byte']:.4f} bits/byte" if row["bits_per_byte"] is not None else ""
  average = f"  of the average {row['ema_val_loss']:.4f}" if "ema_val_loss" in row else ""
  loss = f"val_loss {row['val_loss']:.4f}{bits}{_preferred(row)}{average}"
  return f"step {row['step']}  {row['set']}: {loss}"


def _preferred(row: Row) -> str:
  """The measures of a row for pairs of answers, if it has them."""
  if "reward_margin" not in row:
    return ""
  return f"  margin {row['reward_margin']:.3f}  {row['reward_accuracy']:.0%} preferred"


def short(number: float) -> str:
  """Formats a number with three digits and a unit: 51.2k, 1.34M."""
  for unit in ("", "k", "M"):
    if abs(number) < 999.5:
      return f"{number:.3g}{unit}"
    number /= 1000
  return f"{number:.3g}G"


def duration(seconds: float) -> str:
  """Formats a duration as minutes and seconds, with hours if needed: 2:03, 1:02:03."""
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
