"""Bits per byte, throughput, and progress on a terminal and in a log."""

import io
import json
import math
import os
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from train.data.bits_per_byte import bits_per_byte, tokens_per_byte
from train.logging import console, throughput
from train.logging.console import Console, duration, short
from train.logging.metric_reader import DivergedError, MetricReader
from train.logging.throughput import Clock


def test_bits_per_byte_sums_over_sets(tmp_path):
  for name, counts in (("a", {"tokens": 100, "bytes": 400}), ("b", {"tokens": 50, "bytes": 100})):
    (tmp_path / f"{name}.json").write_text(json.dumps(counts))
  assert tokens_per_byte(tmp_path, ["a", "b"]) == 150 / 500
  assert tokens_per_byte(tmp_path, ["a", "without"]) is None
  assert bits_per_byte(math.log(2) * 3, 150 / 500) == pytest.approx(0.9)
  assert bits_per_byte(1.0, None) is None


def test_clock_reading_starts_new_interval(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(throughput.time, "perf_counter", lambda: now[0])
  clock = Clock(tokens_per_step=100)
  for when in (0.5, 1.0, 1.5, 2.0):
    clock.tick(when)
  now[0] = 9.0  # read late
  assert clock.read()[0] == 200
  clock.tick(4.0)
  assert clock.read()[0] == 50
  now[0] = 1000.0  # after an evaluation
  clock.restart()
  clock.tick(1000.25)
  assert clock.read()[0] == 400
  assert clock.seconds_left(12) == pytest.approx(12 * 1000.25 / 6)  # with the evaluation


def test_clock_that_waited_longer_than_its_interval_waited_all_the_time(monkeypatch):
  monkeypatch.setattr(throughput.time, "perf_counter", lambda: 1.0)
  clock = Clock(tokens_per_step=100)
  clock.waited(9.0)  # also for the batch of the next step
  clock.tick(3.0)
  assert clock.read() == (50, 1.0)


@pytest.fixture
def reader(tiny):
  """Returns a function that reads {step: changed metrics} of 12 steps; the rows and the lines."""

  def read(changes, **settings):
    cfg = tiny(**settings)
    rows, lines = [], io.StringIO()
    run = types.SimpleNamespace(skipped_steps=dict, append=rows.extend, checkpoints="there")
    made = MetricReader(cfg, run, Console(lines), jax.devices()[:1])
    for step in range(1, 13):
      metrics = {"loss": 2.0 + step, "grad_norm": 0.5, "param_norm": 3.0, "learning_rate": 1e-3}
      metrics |= {"tokens": 99.0, "skipped": 0.0} | changes.get(step, {})
      made.push(step, {name: jnp.float32(x) for name, x in metrics.items()})
      assert len(rows) <= step - 1  # those of a step are read after the next was dispatched
    made.flush()
    return rows, lines.getvalue()

  return read


def test_rows_are_those_of_every_few_steps_and_of_the_last(reader, tmp_path):
  rows, lines = reader({}, log_every=5, seq_len=8, data__folder=str(tmp_path / "none"))
  assert [row["step"] for row in rows] == [5, 10, 12]
  assert [row["loss"] for row in rows] == [7, 12, 14]
  assert [row["tokens"] for row in rows] == [5 * 32, 10 * 32, 12 * 32]  # also without a target
  assert {row["bits_per_byte"] for row in rows} == {None}  # the text is not tokenized
  assert [line.split()[1] for line in lines.splitlines()] == ["5/12", "10/12", "12/12"]


def test_skipped_steps_are_rows_of_their_own_and_end_a_run_in_sequence_only(reader):
  skipped = {"skipped": 1.0}
  changes = {step: skipped | {"loss": math.nan} for step in (2, 3, 5, 6)}
  rows, lines = reader(changes | {8: skipped | {"grad_norm": 1e9}}, max_skipped=3)
  found = [(row["step"], row["why"]) for row in rows if row["kind"] == "skipped"]
  assert found[:4] == [(step, "loss is nan") for step in (2, 3, 5, 6)]
  assert found[4] == (8, "a spike: loss 10, grad_norm 1e+09")
  counts = {row["step"]: row["skipped"] for row in rows if row["kind"] == "train"}
  assert counts == {1: 0, 4: 2, 7: 4, **dict.fromkeys((9, 10, 11, 12), 5)}
  assert "step 8 skipped (a spike: loss 10, grad_norm 1e+09); 5 in total" in lines
  assert [row["loss"] for row in rows if row["kind"] == "skipped"] == [*[None] * 4, 10]
  with pytest.raises(DivergedError, match="last 3 steps, up to 4, were skipped") as raised:
    reader(dict.fromkeys((2, 3, 4), skipped), max_skipped=3)
  assert raised.value.weights_are_good
  with pytest.raises(DivergedError, match="param_norm is inf at step 7") as raised:
    reader({7: {"param_norm": math.inf}}, log_every=100)
  assert not raised.value.weights_are_good


class Terminal(io.StringIO):
  def isatty(self):
    return True


def test_console_progress_on_terminal_overwrites_line():
  out = Terminal()
  console = Console(out)
  for text in ("step 1", "step 2"):
    console.progress(text)
  console.say("saved")
  console.progress("step 3")
  console.say("done")
  assert out.getvalue() == ("\r\x1b[Kstep 1\r\x1b[Kstep 2\nsaved\n\r\x1b[Kstep 3\ndone\n")


def test_console_of_a_dead_reader_goes_on():
  reading, writing = os.pipe()
  with os.fdopen(writing, "w") as stream:
    console = Console(stream)
    os.close(reading)
    for _ in range(3):
      console.say("x")
  # Leaving the block flushes what is left, as the end of the process does: no BrokenPipeError.
  console.say("closed")


def test_console_of_few_characters_prints_the_rest():
  stream = io.TextIOWrapper(io.BytesIO(), "ascii")
  Console(stream).say("naïve")
  assert stream.buffer.getvalue() == b"na?ve\n"


def test_console_without_stdout_is_silent(monkeypatch):
  monkeypatch.setattr(sys, "stdout", None)  # closed before Python started
  Console().progress("step 1")


def test_clock_data_wait_is_fraction_of_time(monkeypatch):
  monkeypatch.setattr(throughput.time, "perf_counter", lambda: 1.0)
  clock = Clock(tokens_per_step=100)
  clock.waited(1.0)
  clock.waited(0.5)
  clock.tick(7.0)
  assert clock.read()[1] == 0.25
  clock.tick(8.0)
  assert clock.read()[1] == 0


def test_console_progress_in_log_is_lines():
  out = io.StringIO()
  console = Console(out)
  console.progress("step 1")
  console.say("saved")
  console.progress("step 2")
  assert out.getvalue() == "step 1\nsaved\nstep 2\n"


def test_train_line_shows_all_metrics():
  row = {"step": 20, "loss": 2.34567, "bits_per_byte": 3.3841, "tokens_per_second": 51234.0}
  row |= {"mfu": None, "data_wait": 0.04, "skipped": 0, "peak_memory": None}
  line = console.train_line(row | {"learning_rate": 7.3e-4}, 1000, 3723)
  assert line == (
    "step   20/1000  loss 2.3457  3.384 bits/byte  51.2k tokens/s  lr 7.30e-04  eta 1:02:03"
  )
  line = console.train_line(row | {"learning_rate": 7.3e-4, "bits_per_byte": None}, 1000, 3)
  assert "bits" not in line
  more = {"mfu": 0.412, "data_wait": 0.25, "skipped": 2, "peak_memory": 3 * 2**30}
  assert console.train_line(row | more | {"learning_rate": 1e-3}, 1000, 65) == (
    "step   20/1000  loss 2.3457  3.384 bits/byte  51.2k tokens/s  mfu 41.2%  3.0 GiB  lr 1.00e-03"
    "  waiting for data 25%  2 skipped  eta 1:05"
  )


@pytest.mark.parametrize(
  ("number", "text"),
  [(0, "0"), (7.25, "7.25"), (999, "999"), (999.6, "1k"), (51234, "51.2k"), (1.34e6, "1.34M"),
   (2e9, "2G"), (5e12, "5e+03G")],
)  # fmt: skip
def test_short_three_digits_and_unit(number, text):
  assert short(number) == text


@pytest.mark.parametrize(
  ("seconds", "text"), [(0.2, "0:00"), (59.6, "1:00"), (123, "2:03"), (3600, "1:00:00")]
)
def test_duration_formats(seconds, text):
  assert duration(seconds) == text
