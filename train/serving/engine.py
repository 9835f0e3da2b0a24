"""The thread of the device: texts that another process sends wait for a slot of the batch.

In this process the thread would have to wait for Python's lock whenever that one works. Lists of
(number of a text, `New`, or whether it is finished) come in, a `News` for each call of the device
goes out; a closed connection is the end of either side.
"""

import collections
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from lnssm_jax.sampling import SamplingOptions
from lnssm_jax.slots import Drawn, Row, Slots


class New(NamedTuple):
  """A text to continue."""

  prompt: np.ndarray
  options: SamplingOptions
  place: int  # `Row.number`
  since: float  # `time.monotonic`, which processes of one machine share
  at_once: bool  # its tokens are sent when it has ended


class News(NamedTuple):
  """New tokens of texts, by number, with `Drawn.ended`; and counters and gauges."""

  drawn: list[tuple[int, list[int], str | None]]
  counts: dict[str, float]
  gauges: dict[str, float]


class Engine:
  """Continues the texts that come through a connection; `run` is its thread.

  Attributes:
    failure: the error that has ended it, or None.
  """

  def __init__(self, slots: Slots, connection: Connection):
    self.failure: BaseException | None = None
    self._slots, self._connection = slots, connection
    self._counts = collections.Counter(dict.fromkeys(COUNTERS, 0))
    self._waiting: dict[int, New] = {}  # the next first
    self._rows: dict[int, Row] = {}
    # Number and `New.since` of the rows, and the tokens so far of those of `New.at_once`.
    self._texts: dict[Row, tuple[int, float, list[int] | None]] = {}

  def run(self) -> None:
    """Works until the other side closes the connection, or a failure; then closes its own."""
    try:
      self._connection.send(self._news([]))
      while True:
        self._receive()
        self._admit()
        self._connection.send(self._news(self._slots.step()))
    except (EOFError, ConnectionError):
      pass
    except BaseException as error:
      self.failure = error
    finally:
      self._connection.close()

  def _receive(self) -> None:
    """Takes what has come, and waits for it if there is nothing to do."""
    idle = not (self._waiting or self._slots.rows)
    while idle or self._connection.poll():
      idle = False
      for number, new in self._connection.recv():
        if isinstance(new, New):
          self._counts["requests_total"] += 1
          self._waiting[number] = new
          continue
        row = self._rows.pop(number, None)
        if row is not None:
          row.cancelled = True
          del self._texts[row]
        if row is not None or self._waiting.pop(number, None):
          self._counts["finished_total" if new else "cancelled_total"] += 1

  def _admit(self) -> None:
    """Gives waiting texts the free slots."""
    while self._waiting and self._slots.free:
      new = self._waiting.pop(number := next(iter(self._waiting)))
      row = Row(new.prompt, new.options, new.place)
      self._slots.add(row)
      self._rows[number] = row
      self._texts[row] = number, new.since, [] if new.at_once else None
      self._counts["queue_seconds_total"] += time.monotonic() - new.since  # pyrefly: ignore
      self._counts["prompt_tokens_total"] += len(row.prompt)
      self._counts["reused_prompt_tokens_total"] += row.reused

  def _news(self, drawn: list[Drawn]) -> News:
    counts, now, found = self._counts, time.monotonic(), []
    for row, tokens, ended in drawn:
      number, since, held = self._texts[row]
      counts["new_tokens_total"] += len(tokens)
      if row.drawn == len(tokens):
        counts["first_tokens_total"] += 1
        counts["first_token_seconds_total"] += now - since  # pyrefly: ignore
      if ended is not None:
        counts["finished_total"] += 1
        del self._rows[number], self._texts[row]
      if held is not None:
        held += tokens
      if held is None or ended is not None:
        found.append((number, tokens if held is None else held, ended))
    gauges: dict[str, Any] = {
      "slots": self._slots.size,
      "slots_used": self._slots.size - self._slots.free,
      "waiting": len(self._waiting),
      "prefix_bytes": self._slots.prefix_bytes,
    }
    return News(found, dict(counts), gauges)


# Texts that came, that had no place, ended by themselves, and were given up by their clients; their
# tokens, of prompts also those whose state was kept; and their seconds in the queue and until their
# first tokens.
COUNTERS = (
  "requests_total",
  "rejected_total",
  "finished_total",
  "cancelled_total",
  "prompt_tokens_total",
  "reused_prompt_tokens_total",
  "new_tokens_total",
  "queue_seconds_total",
  "first_tokens_total",
  "first_token_seconds_total",
)
