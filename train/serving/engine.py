"""The thread of the device: texts wait in a queue of bounded length for a slot of the batch."""

import collections
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from lnssm_jax import generate
from lnssm_jax.slots import Drawn, Row, Slots

type Deliver = Callable[[Drawn], None]  # called by the engine's thread


class Busy(Exception):
  """The queue is full."""


class Engine:
  """Continues rows that any thread submits; `run` is the engine's own thread.

  Args:
    slots: of the batch.
    queue: the most rows that wait for one.

  Attributes:
    failure: the error that has ended it, or None.
    counts: what `metrics` prints, by name.
  """

  def __init__(self, slots: Slots, *, queue: int):
    self.slots, self.queue = slots, queue
    self.failure: BaseException | None = None
    self.counts: collections.Counter[str] = collections.Counter()
    self._waiting: collections.deque[tuple[Row, Deliver, float]] = collections.deque()
    self._deliver: dict[Row, tuple[Deliver, float]] = {}
    self._changed, self._stopped = threading.Condition(), False

  def submit(self, rows: Sequence[Row], deliver: Deliver) -> None:
    """Queues rows, all or none.

    Raises:
      Busy: they do not fit into the queue.
      ValueError: as `generate.generate`.
    """
    for row in rows:
      generate.checked(self.slots.model, [row.prompt], row.options)
    with self._changed:
      if self.failure is not None or self._stopped or len(self._waiting) + len(rows) > self.queue:
        self.counts["rejected_total"] += len(rows)
        raise Busy
      now = time.monotonic()
      self._waiting.extend((row, deliver, now) for row in rows)
      self.counts["requests_total"] += len(rows)
      self._changed.notify()

  def cancel(self, rows: Sequence[Row]) -> None:
    """Frees the places of rows that have not ended; nothing more of them is delivered."""
    with self._changed:
      for row in rows:
        row.cancelled = True
      kept = [place for place in self._waiting if not place[0].cancelled]
      self.counts["cancelled_total"] += len(self._waiting) - len(kept)
      self._waiting = collections.deque(kept)
      self._changed.notify()

  def stop(self) -> None:
    """Has `run` return after the call of the device that it is in."""
    with self._changed:
      self._stopped = True
      self._changed.notify()

  def run(self) -> None:
    """Works until `stop`, or a `failure`; rows that have not ended then end as "failed"."""
    try:
      while self._admit():
        for drawn in self.slots.step():
          self._pass_on(drawn)
        self._drop()
    except BaseException as error:
      self.failure = error
    finally:
      with self._changed:
        self._stopped = True
        left = [(row, deliver) for row, deliver, _ in self._waiting]
        left += [(row, deliver) for row, (deliver, _) in self._deliver.items()]
        self._waiting.clear()
        self._deliver.clear()
      for row, deliver in left:
        deliver(Drawn(row, [], "failed"))

  def _admit(self) -> bool:
    """Gives waiting rows the free slots; waits for rows if there are none; False to end."""
    with self._changed:
      self._changed.wait_for(lambda: self._stopped or self._waiting or self.slots.rows)
      free = self.slots.size - len(self.slots.rows)
      new = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
      if self._stopped:
        self._waiting.extendleft(reversed(new))
        return False
      self._deliver |= {row: (deliver, since) for row, deliver, since in new}
    for row, _, since in new:
      self.slots.add(row)
      self.counts["queue_seconds_total"] += time.monotonic() - since  # pyrefly: ignore
      self.counts["prompt_tokens_total"] += len(row.prompt)
      self.counts["reused_prompt_tokens_total"] += row.reused
    return True

  def _pass_on(self, drawn: Drawn) -> None:
    row, tokens, ended = drawn
    deliver, since = self._deliver[row]
    if row.cancelled:
      return
    if row.drawn == len(tokens):
      self.counts["first_tokens_total"] += 1
      self.counts["first_token_seconds_total"] += time.monotonic() - since  # pyrefly: ignore
    self.counts["new_tokens_total"] += len(tokens)
    if ended is not None:
      self.counts["finished_total"] += 1
      del self._deliver[row]
    deliver(drawn)

  def _drop(self) -> None:
    for row in [row for row in self._deliver if row.cancelled]:
      del self._deliver[row]
      self.counts["cancelled_total"] += 1

  def metrics(self) -> str:
    """Counters and gauges in the text format of Prometheus."""
    gauges = {
      "slots": self.slots.size,
      "slots_used": len(self.slots.rows),
      "waiting": len(self._waiting),
      "prefix_bytes": self.slots.prefix_bytes,
    }
    lines: list[Any] = []
    for kind, values in (("counter", dict.fromkeys(COUNTERS, 0) | self.counts), ("gauge", gauges)):
      for name, value in values.items():
        lines += [f"# TYPE lnssm_{name} {kind}", f"lnssm_{name} {value}"]
    return "\n".join([*lines, ""])


# Rows submitted, which had no place, ended by themselves, and were given up by their clients; their
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
