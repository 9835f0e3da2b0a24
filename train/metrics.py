"""Numbers of a run for people and files: bits per byte, throughput, the progress line."""

import math
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from train.data.tokenize import read_sidecar

Row = dict[str, Any]  # one object of metrics.jsonl


def wrong_row(row: Any) -> str | None:
  """Why `row`, read from a file, cannot be one of metrics.jsonl; None if it can.

  A row has a `kind` and a `step`, one of training a `loss`, one of an evaluation a `set`, its
  `val_loss` and perhaps `bits_per_byte`.
  """
  if not isinstance(row, dict):
    return "no JSON object"
  kind, step = row.get("kind"), row.get("step")
  if not isinstance(kind, str) or type(step) is not int or not 0 <= step < 2**53:
    return f"kind {kind!r:.50} and step {step!r:.50}"
  numbers = {"train": ["loss"], "eval": ["val_loss", "bits_per_byte"]}.get(kind, [])
  for name in numbers:
    value = row.get(name)
    if type(value) not in (int, float) and (name != "bits_per_byte" or value is not None):
      return f"{name} {value!r:.50}"
    if type(value) is int and abs(value) >= 2**53:
      return f"{name} is too large"
  return (
    f"set {row.get('set')!r:.50}" if kind == "eval" and type(row.get("set")) is not str else None
  )


def tokens_per_byte(folder: str | Path, names: Iterable[str]) -> float | None:
  """Tokens per UTF-8 byte of text over token sets, from their sidecars; None without them all."""
  tokens = size = 0
  for name in names:
    sidecar = read_sidecar(Path(folder) / name)
    if sidecar is None:
      return None
    tokens, size = tokens + sidecar["tokens"], size + sidecar["bytes"]
  return tokens / size


def bits_per_byte(nats_per_token: float, tokens_per_byte: float | None) -> float | None:
  """nats per token / ln 2 * tokens / bytes: comparable across tokenizers."""
  return None if tokens_per_byte is None else nats_per_token / math.log(2) * tokens_per_byte


class Clock:
  """Tokens a second between readings, and the time to the end of the run. Times in seconds."""

  def __init__(self, tokens_per_step: int):
    self._tokens_per_step = tokens_per_step
    self._steps_done = 0
    self.restart()
    self._begin = self._since

  def restart(self) -> None:
    """Forgets the interval so far: what came between (evaluation, saving) was not training."""
    self._since = self._last = time.perf_counter()
    self._steps = 0
    self._waited = 0.0

  def tick(self, when: float) -> None:
    """Counts a step that was finished at `when`, of `time.perf_counter()`."""
    self._last = max(self._last, when)
    self._steps += 1
    self._steps_done += 1

  def waited(self, seconds: float) -> None:
    """Counts time that was spent waiting for a batch."""
    self._waited += seconds

  def data_wait(self) -> float:
    """The share of the time since the last reading or `restart` that was waiting, 0 to 1.

    To be asked before `tokens_per_second`, which begins anew.
    """
    return min(1.0, self._waited / max(self._last - self._since, 1e-9))

  def tokens_per_second(self) -> float:
    """From the last reading or `restart` to the last step."""
    self._waited = 0.0
    rate = self._steps * self._tokens_per_step / max(self._last - self._since, 1e-9)
    self._since, self._steps = self._last, 0
    return rate

  def seconds_left(self, steps_left: int) -> float:
    """By the mean over this whole process, with its evaluations and checkpoints."""
    return steps_left * (self._last - self._begin) / max(self._steps_done, 1)


class Console:
  """Prints to a terminal, where the progress line rewrites itself, or to a log, line by line."""

  def __init__(self, stream: TextIO | None = None, *, quiet: bool = False):
    self._stream, self._quiet = stream or sys.stdout, quiet
    self._rewrites = self._stream.isatty()
    self._open = False  # a progress line without its line feed stands at the end

  def say(self, text: str) -> None:
    """One line that stays."""
    self._write(("\n" if self._open else "") + text + "\n")
    self._open = False

  def progress(self, text: str) -> None:
    """One line that the next progress line replaces, where that is possible."""
    self._write(f"\r\x1b[K{text}" if self._rewrites else text + "\n")
    self._open = self._rewrites

  def _write(self, text: str) -> None:
    if self._quiet:
      return
    try:
      self._stream.write(text)
      self._stream.flush()
    except BrokenPipeError:  # whoever reads has left
      raise
    except OSError:  # a log on a full disk is no reason to stop training
      pass


def train_line(row: Row, steps: int, seconds_left: float) -> str:
  """The progress line of a row of metrics.jsonl."""
  bits = f"  {row['bits_per_byte']:.3f} bits/byte" if row["bits_per_byte"] is not None else ""
  mfu = f"  mfu {row['mfu']:.1%}" if row["mfu"] is not None else ""
  slow = f"  waiting for data {row['data_wait']:.0%}" if row["data_wait"] >= 0.1 else ""
  skipped = f"  {row['skipped']} left out" if row["skipped"] else ""
  peak = row["peak_memory"]
  memory = f"  {peak / 2**30:.1f} GiB" if peak is not None else ""
  return (
    f"step {row['step']:>{len(str(steps))}}/{steps}  loss {row['loss']:.4f}{bits}"
    f"  {short(row['tokens_per_second'])} tokens/s{mfu}{memory}  lr {row['learning_rate']:.2e}"
    f"{slow}{skipped}  eta {duration(seconds_left)}"
  )


def eval_line(row: Row) -> str:
  """One line for the evaluation of one set."""
  bits = f"  {row['bits_per_byte']:.4f} bits/byte" if row["bits_per_byte"] is not None else ""
  return f"step {row['step']}  {row['set']}: val_loss {row['val_loss']:.4f}{bits}"


def short(number: float) -> str:
  """Three digits and a unit: 51.2k, 1.34M."""
  for unit in ("", "k", "M"):
    if abs(number) < 999.5:
      return f"{number:.3g}{unit}"
    number /= 1000
  return f"{number:.3g}G"


def duration(seconds: float) -> str:
  """Hours, minutes and seconds: 2:03, 1:02:03."""
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
