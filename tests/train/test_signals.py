"""Processes stopped by signals."""

import os
import signal
import time
from pathlib import Path

import pytest

from train import trainer
from train.checkpoint.store import newest_step
from train.cluster import stop_signal
from train.cluster.stop_signal import StopSignal
from train.runs.run_folder import RunFolder

STEPS = 160


def wait_for_step(process, cfg, step):
  """Waits until the run has logged `step`."""
  metrics = RunFolder(cfg.run_dir).metrics_file
  deadline = time.monotonic() + 120
  while time.monotonic() < deadline:
    assert process.poll() is None, process.communicate()
    if metrics.exists() and f'"step": {step},' in metrics.read_text():
      return
    time.sleep(0.005)
  process.kill()
  raise AssertionError(f"step {step} was not reached: {process.communicate()}")


INTERRUPTED, KILLED = (signal.SIGINT, 30), (signal.SIGKILL, 70)  # and after which step


@pytest.mark.parametrize(
  "stops",
  [
    (KILLED,),  # what the other signals do in a run's own process: test_loop.py
    pytest.param(((signal.SIGTERM, 10), INTERRUPTED, KILLED), marks=pytest.mark.slow),
  ],
  ids=len,
)
def test_signals_any_resumed_run_bit_exact(stops, tiny, config_file, command, tmp_path):
  options = {"steps": STEPS, "eval_every": 80, "checkpoint_every": 25}
  cfg = tiny(**options, run_dir=str(tmp_path / "stopped"))
  fit = ("-m", "train", "fit", "--config", config_file(cfg))
  checkpoints = Path(cfg.run_dir) / "checkpoints"
  for number, after in stops:
    process = command(*fit)
    wait_for_step(process, cfg, after)
    process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    step = newest_step(checkpoints)
    if number is signal.SIGKILL:
      assert process.returncode == -signal.SIGKILL
      assert step >= 25
    else:
      assert process.returncode == 0, errors
      assert f"stopped by {number.name} after step {step}; saved" in out
      assert step >= after
    assert step < STEPS, "the run was over before the signal came"
  result = trainer.fit(cfg)
  reference = tiny(**options, run_dir=str(tmp_path / "whole"))
  assert trainer.fit(reference).step == result.step == STEPS

  def rows(cfg):
    kept = ("kind", "step", "set", "loss", "val_loss", "grad_norm", "param_norm", "learning_rate")
    return [{k: row.get(k) for k in kept} for row in RunFolder(cfg.run_dir).read_rows()]

  assert rows(cfg) == rows(reference)


@pytest.mark.slow
def test_signals_closed_terminal_saves_and_fails(tiny, config_file, command):
  """Its reader exits, then SIGHUP comes twice, as from a terminal's shell and from the kernel."""
  cfg = tiny(steps=5000, eval_every=5000, checkpoint_every=5000)
  before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would stay ignored
  try:
    process = command("-m", "train", "fit", "--config", config_file(cfg), PYTHONIOENCODING="ascii")
  finally:
    signal.signal(signal.SIGHUP, before)
  process.stdout.readline()
  process.stdout.close()
  wait_for_step(process, cfg, 10)  # more lines follow than the one that fails
  process.send_signal(signal.SIGHUP)
  process.send_signal(signal.SIGHUP)
  assert process.wait(timeout=60) == 128 + signal.SIGHUP, process.stderr.read()
  step = newest_step(Path(cfg.run_dir) / "checkpoints")
  assert 10 <= step < 5000
  process.stderr.close()


def test_signals_second_one_stops_immediately(command):
  script = (
    "import time\nfrom train.cluster.stop_signal import StopSignal\n"
    "with StopSignal() as stop:\n"
    "  print('ready', flush=True)\n"
    "  while not stop: time.sleep(0.001)\n"
    "  print(stop.name, flush=True)\n"
    "  time.sleep(60)\n"
  )
  process = command("-c", script)
  assert process.stdout.readline() == "ready\n"
  process.send_signal(signal.SIGTERM)
  assert process.stdout.readline() == "SIGTERM\n"
  begin = time.monotonic()
  process.send_signal(signal.SIGINT)
  process.communicate(timeout=30)
  assert process.returncode == -signal.SIGINT
  assert time.monotonic() - begin < 10


def test_signals_before_training_end_the_process_at_once_with_its_code(command):
  """Even inside a long call, here one that continues after a handler."""
  script = (
    "import time\nfrom train.cluster.stop_signal import StopSignal\n"
    "with StopSignal({'SIGTERM': 75}.get) as stop:\n"
    "  print('ready', flush=True)\n"
    "  time.sleep(60)\n"
  )
  process = command("-c", script)
  assert process.stdout.readline() == "ready\n"
  process.send_signal(signal.SIGTERM)
  out, errors = process.communicate(timeout=30)
  assert (process.returncode, errors) == (75, "")
  assert out == "stopped by SIGTERM before training began. Run the same command to resume.\n"


def test_signals_once_training_has_begun_are_only_recorded():
  with StopSignal({}.__getitem__) as outer, stop_signal.begun(outer) as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop is outer and stop.name == "SIGTERM"
  assert signal.set_wakeup_fd(-1) == -1


def test_signals_after_the_last_step_leave_the_exit_code(command):
  """While handlers of `atexit` run, and while Python takes its modules apart."""
  script = """
import atexit, os, signal
from train.cli import process
from train.cluster.stop_signal import SIGNALS
class Late:
  def __del__(self, kill=os.kill, own=os.getpid()):
    for number in SIGNALS:
      kill(own, number)
late = Late()
def command():
  for number in reversed(SIGNALS):  # SIGINT comes first: after another it would be a second Ctrl-C
    atexit.register(os.kill, os.getpid(), number)
  return 7
process.run(command)
"""
  process = command("-c", script)
  assert (process.communicate(timeout=30), process.returncode) == (("", ""), 7)


def test_signals_handlers_restored():
  before = [signal.getsignal(number) for number in stop_signal.SIGNALS]
  with StopSignal() as stop:
    assert not stop
    os.kill(os.getpid(), signal.SIGINT)
    assert stop
    assert stop.name == "SIGINT"
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL  # a second Ctrl-C ends it,
    for number in stop_signal.SIGNALS[1:]:  # and nothing else that schedulers send twice
      assert signal.getsignal(number) is not signal.SIG_DFL
  assert [signal.getsignal(number) for number in stop_signal.SIGNALS] == before


def test_signals_hangup_stays_ignored_under_nohup():
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
  try:
    with StopSignal() as stop:
      os.kill(os.getpid(), signal.SIGHUP)
      assert not stop
  finally:
    signal.signal(signal.SIGHUP, before)
