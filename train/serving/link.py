"""The end of an engine's connection in the process of HTTP: a queue of bounded length."""

import asyncio
import dataclasses
import itertools
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lnssm_jax import generate
from lnssm_jax.pretrained.tokenizers import Tokenizer
from lnssm_jax.slots import Drawn, Row
from train.serving.engine import New, News

type Deliver = Callable[[Drawn], None]


@dataclasses.dataclass(frozen=True)
class Served:
  """A model without its parameters, and bounds: the first message to the process of HTTP.

  Attributes:
    model: what `generate.checked` and messages need of it.
    settings: of the `LoadedModel`, for its options.
    slots, queue, most_tokens: as of `command.serve`.
  """

  model: Any
  settings: Mapping[str, Any]
  source: Path
  tokenizer: Tokenizer
  slots: int
  queue: int
  most_tokens: int


class Busy(Exception):
  """The queue is full."""


class Link:
  """Has an engine continue rows; used by the thread of an event loop.

  Args:
    model: whose prompts and options these are, as `generate.checked` reads it.
    slots: of the engine.
    queue: the most rows that wait for one.

  Attributes:
    lost: whether the engine is gone; rows that had not ended have ended as "failed".
  """

  def __init__(self, connection: Connection, model: Any, *, slots: int, queue: int):
    self.queue, self.lost = queue, False
    self._connection, self._model, self._most = connection, model, slots + queue
    self._numbers = itertools.count()
    self._rows: dict[int, tuple[Row, Deliver]] = {}
    self._number_of: dict[Row, int] = {}
    self._rejected = 0
    self._news: News = connection.recv()
    # And not delivered yet.
    self._drawn: OrderedDict[int, tuple[list[int], str | None]] = OrderedDict()
    # Nobody reads while the device compiles, and what is sent then would hold the event loop.
    self._sender, self._sending = ThreadPoolExecutor(1), False
    self._unsent: dict[int, New | bool] = {}

  def open(self, when_lost: Callable[[], None]) -> None:
    """Begins to deliver tokens, in the running event loop."""
    loop = asyncio.get_running_loop()

    def add(number: int, tokens: list[int], ended: str | None) -> None:
      before, was = self._drawn.get(number, ([], None))
      self._drawn[number] = before + tokens, was or ended

    def read() -> None:
      waits = bool(self._drawn)
      try:
        while True:  # all that has come, which is more than once if the event loop is busy
          self._news = self._connection.recv()
          for drawn in self._news.drawn:
            add(*drawn)
          if not self._connection.poll():
            break
      except (EOFError, OSError):
        loop.remove_reader(self._connection.fileno())
        self.lost = True
        for number in self._rows:
          add(number, [], "failed")
        when_lost()
      if not waits:
        deliver()

    def deliver() -> None:
      """Of texts that end at once the first is answered before the next: its client asks again."""
      while self._drawn:
        number, (tokens, ended) = self._drawn.popitem(last=False)
        if number in self._rows:  # or its client has left
          self._deliver(number, tokens, ended)
          if ended:
            loop.call_soon(deliver)
            break

    loop.add_reader(self._connection.fileno(), read)
    # uvloop has made it one that does not wait for the rest of a long message.
    os.set_blocking(self._connection.fileno(), True)

  def submit(self, rows: Sequence[Row], deliver: Deliver, *, at_once: bool = False) -> None:
    """Queues rows, all or none; `deliver` gets their tokens, or those of each row `at_once`.

    Raises:
      Busy: they do not fit into the queue.
      ValueError: as `generate.generate`.
    """
    for row in rows:
      generate.checked(self._model, [row.prompt], row.options)
    if self.lost or len(self._rows) + len(rows) > self._most:
      self._rejected += len(rows)
      raise Busy
    now = time.monotonic()
    for row in rows:
      self._number_of[row] = number = next(self._numbers)
      self._rows[number] = row, deliver
      self._unsent[number] = New(row.prompt, row.options, row.number, now, at_once)
    self._send()

  def cancel(self, rows: Sequence[Row], *, finished: bool = False) -> None:
    """Frees the places of rows that have not ended; nothing more of them is delivered.

    They count as cancelled, or as `finished`, by a stop string.
    """
    for row in rows:
      number = self._number_of.pop(row, None)
      if number is not None:
        del self._rows[number]
        if not self._unsent.pop(number, None):
          self._unsent[number] = finished
    self._send()

  def _send(self) -> None:
    """Sends what has come together; what comes while it does is sent at once afterwards."""

    def sent(sending: asyncio.Future[None]) -> None:
      self._sending = False
      if sending.exception() is None:  # or the engine is gone, which `read` sees
        self._send()

    if self._unsent and not self._sending:
      self._sending, batch, self._unsent = True, list(self._unsent.items()), {}
      loop = asyncio.get_running_loop()
      loop.run_in_executor(self._sender, self._connection.send, batch).add_done_callback(sent)

  def _deliver(self, number: int, tokens: list[int], ended: str | None) -> None:
    row, deliver = self._rows[number]
    row.drawn += len(tokens)
    if ended:
      del self._rows[number], self._number_of[row]
    deliver(Drawn(row, tokens, ended))

  def metrics(self) -> str:
    """Counters and gauges, as of the last call of the device, in the text format of Prometheus."""
    counts = self._news.counts | {"rejected_total": self._rejected}
    lines: list[Any] = []
    for kind, values in (("counter", counts), ("gauge", self._news.gauges)):
      for name, value in values.items():
        lines += [f"# TYPE lnssm_{name} {kind}", f"lnssm_{name} {value}"]
    return "\n".join([*lines, ""])
