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


def test_signals_handlers_restored():
  before = [signal.getsignal(number) for number in stop_signal.SIGNALS]
  with StopSignal() as stop:
    assert not stop
    os.kill(os.getpid(), signal.SIGINT)
    assert stop
    assert stop.name == "SIGINT"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # a second signal ends it,
    assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL  # except this one
  assert [signal.getsignal(number) for number in stop_signal.SIGNALS] == before


def test_signals_hangup_stays_ignored_under_nohup():
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
  try:
    with StopSignal() as stop:
      os.kill(os.getpid(), signal.SIGHUP)
      assert not stop
  finally:
    signal.signal(signal.SIGHUP, before)
