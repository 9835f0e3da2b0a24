"""`benchmarks.turns`: processes that compile together and are timed alone."""

import sys

from benchmarks import turns


def script(text):
  return [sys.executable, "-c", "import json, time\nfrom benchmarks import turns\n" + text]


def test_all_are_ready_before_the_first_has_its_turn():
  text = "ready = time.time(); turns.wait(); begin = time.time(); time.sleep(0.05);"
  text += "print(json.dumps({'ready': ready, 'begin': begin, 'end': time.time()}))"
  found = list(turns.take([script(text)] * 3, at_once=2))
  assert max(times["ready"] for times in found) < found[0]["begin"]
  assert found[0]["end"] < found[1]["begin"]
  assert found[1]["end"] < found[2]["begin"]


def test_a_process_that_fails_says_why_and_the_others_go_on():
  works = script("turns.wait(); print('note'); print(json.dumps({'x': 1}))")
  early, late = (
    script("raise ValueError('early')"),
    script("turns.wait(); raise ValueError('late')"),
  )
  first, second, third = turns.take([early, late, works])
  assert first["note"].endswith("ValueError: early")
  assert second["note"].endswith("ValueError: late")
  assert third == {"x": 1}


def test_command_that_takes_too_long_is_ended():
  command = [sys.executable, "-c", "import time; time.sleep(60)"]
  assert turns.alone(command, 0.2) == {"note": "not finished after 0.2 s"}


def test_process_that_is_not_ready_in_time_is_ended():
  command = [sys.executable, "-c", "import time; time.sleep(60)"]
  assert list(turns.take([command], patience=0.2)) == [{"note": "not ready in time"}]
