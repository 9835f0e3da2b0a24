"""The two ends of the server's connection, each with a stand-in for the other."""

import asyncio
import os
import threading
import time
import types
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import numpy as np
import pytest

from lnssm_jax.pretrained.loaded import LoadedModel
from lnssm_jax.pretrained.tokenizers import ByteTokenizer
from lnssm_jax.sampling import SamplingOptions
from lnssm_jax.slots import Drawn, Row

for _name in ("starlette", "uvicorn", "jinja2"):
  pytest.importorskip(_name, reason=f"the extra `serve` is not installed: no {_name}")
from train.serving import app, command  # noqa: E402
from train.serving.engine import COUNTERS, Engine, New, News  # noqa: E402
from train.serving.link import Link  # noqa: E402

OPTIONS = SamplingOptions(max_tokens=3)
MODEL = types.SimpleNamespace(vocab_size=300, max_length=None, dtype="float32")


class OneSlot:
  """Draws 5 and 6, each by a call, of one row after another."""

  size, prefix_bytes = 1, 0

  def __init__(self):
    self.rows = []

  @property
  def free(self):
    return 1 - len(self.rows)

  def add(self, row):
    self.rows.append(row)

  def step(self):
    (row,) = self.rows
    row.drawn += 1
    token, ended = (5, None) if row.drawn == 1 else (6, "length")
    if ended:
      self.rows.remove(row)
    return [Drawn(row, [token], ended)]


def test_engine_continues_texts_in_the_order_in_which_they_came():
  """Those that end at once get all of their tokens together; times are counted in seconds."""
  here, there = Pipe()
  engine = Engine(OneSlot(), there)
  thread = threading.Thread(target=engine.run)
  begin = time.monotonic()
  here.send([(n, New(np.array([1]), OPTIONS, 0, begin, n != 1)) for n in range(3)])
  thread.start()
  drawn, news = [], None
  while sum(ended is not None for *_, ended in drawn) < 3:
    news = here.recv()
    drawn += news.drawn
  here.close()
  thread.join()
  assert engine.failure is None
  wanted = [(0, [5, 6], "length"), (1, [5], None), (1, [6], "length"), (2, [5, 6], "length")]
  assert drawn == wanted
  counts, passed = news.counts, time.monotonic() - begin
  assert (counts["first_tokens_total"], counts["new_tokens_total"]) == (3, 6)
  for name in ("queue_seconds_total", "first_token_seconds_total"):
    assert 0 <= counts[name] <= 3 * passed, name


def test_tokens_that_came_before_the_engine_was_lost_are_delivered():
  """Each text once, the first first; one that had ended has not failed."""
  here, there = Pipe()
  there.send(News([], dict.fromkeys(COUNTERS, 0), {}))
  rows, found, lost = [Row(np.array([1]), OPTIONS, n) for n in range(3)], [], asyncio.Event()

  async def delivered():
    link = Link(here, MODEL, slots=1, queue=5)
    link.submit(rows, found.append)
    while len(there.recv()) < 3:
      pass
    there.send(News([(0, [7], None), (1, [8], None)], {}, {}))
    there.send(News([(1, [9], "stop"), (0, [7, 7], "length")], {}, {}))
    there.close()
    link.open(lost.set)
    await asyncio.wait_for(lost.wait(), 20)
    while len(found) < 3:
      await asyncio.sleep(0)

  asyncio.run(asyncio.wait_for(delivered(), 20))
  first, second, last = rows
  assert found == [
    Drawn(first, [7, 7, 7], "length"),
    Drawn(second, [8, 9], "stop"),
    Drawn(last, [], "failed"),
  ]
  assert [row.drawn for row in rows] == [3, 2, 0]


def test_tokens_after_a_stop_string_are_no_part_of_a_text():
  """They may be on their way when the text is given up."""
  loaded = types.SimpleNamespace(tokenizer=ByteTokenizer(), model=MODEL)
  link = types.SimpleNamespace(cancel=lambda rows, **_: None)
  asked = types.SimpleNamespace(
    options=OPTIONS, prompts=[np.array([97]), np.array([98])], until=("yz",), stream=False
  )

  async def whole():
    choices = app._Choices(loaded, link, asked)
    for number, text, ended in [(0, b"xy", None), (0, b"z", None), (0, b"yz", "length")]:
      choices._news.put_nowait(Drawn(choices._rows[number], [*text], ended))
    choices._news.put_nowait(Drawn(choices._rows[1], [*b"ab"], "length"))
    return await choices.whole(), choices.new_tokens

  assert asyncio.run(whole()) == ([("x", "stop"), ("ab", "length")], 5)


def test_process_of_http_gets_the_bounds_of_the_model_and_its_failure_is_an_error(monkeypatch):
  loaded = LoadedModel(MODEL, {"sample": {}}, 0, Path("m"), list, ByteTokenizer)
  monkeypatch.setattr(MODEL, "max_length", 7)
  monkeypatch.setattr(command, "Slots", lambda *_, **__: OneSlot())
  served = []

  class Front:
    """Fails when it has been told what it serves."""

    def __init__(self, connection, _):
      self.end = Connection(os.dup(connection.fileno()))
      self.end.send("ready")

    def poll(self):
      return 3

    def terminate(self):
      served.append(self.end.recv())
      self.end.close()

    def wait(self):
      return 3

  monkeypatch.setattr(command, "_start", Front)
  with pytest.raises(command.FrontError, match="ended with exit status 3"):
    command.serve(loaded, say=lambda _: None, port=0)
  assert served[0].model.max_length == served[0].most_tokens == 7
