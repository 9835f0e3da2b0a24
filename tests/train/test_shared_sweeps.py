"""Several processes of one sweep: who trains which group, and what is written in the end."""

import dataclasses
import itertools
import json
import os
import re
import signal
import sys
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from experiments.recall_sweep import Recall
from tests.train.test_copies import settings
from tests.train.test_sweeps import FILE, quiet, sweep_of, text_runs
from train.cli.main import main
from train.runs import run_folder
from train.runs.run_folder import InUseError, RunFolder, claim
from train.runs.run_lock import RunLock
from train.sweeps import command, grid, groups, plots, processes, spec, tables, training

STEPS = 7


class Killed(BaseException):
  pass


class Instant:
  """Work that pauses twice, without a model; the score of a run is its learning rate."""

  def __init__(self, group, kernels):
    del kernels
    self.group, self.step = group, 0
    step = lambda state, batch: (state, {})
    self.copies = SimpleNamespace(state={"step": jnp.zeros(1)}, advance=step)

  @property
  def finished(self):
    return self.step == STEPS

  def batches(self, start):
    yield from itertools.repeat({})

  def pauses(self, step):
    return step in (3, STEPS)

  def measure(self, step, metrics):
    self.step = step
    return [[] for _ in self.group.runs]

  def scores(self):
    name = "accuracy" if self.group.first.task else "validation loss"
    return [{name: rate} for _, rate in self.group.pairs]

  def position(self, step):
    return {"step": step}

  def restore(self, position):
    self.step = position["step"]


@pytest.fixture(autouse=True)
def trained(monkeypatch):
  """Trains instantly; the groups that have been, as the numbers of their runs in their sweep."""
  found, measure = [], Instant.measure

  def noted(self, *given):
    if not self.step:
      found.append(self.group.runs)
    return measure(self, *given)

  monkeypatch.setattr(Instant, "measure", noted)
  monkeypatch.setattr(
    Recall, "work", lambda self, runs, kernels: Instant(groups.Group(runs), kernels)
  )
  monkeypatch.setattr(training, "Text", Instant)
  monkeypatch.setattr(training, "initializer", lambda cfg: lambda key: key)
  monkeypatch.setattr(plots, "draw", lambda *_: None)
  monkeypatch.setattr(run_folder, "versions", dict)  # starts git
  return lambda sweep: [[sweep.runs.index(run) for run in runs] for runs in found]


@pytest.fixture
def sweep(tmp_path):
  """Three groups of four runs."""
  task = Recall(pairs=3, vocab_size=40, train_rows=12, test_rows=8)
  axes, rates = {"global_batch": (2, 4, 8)}, (3e-3, 1e-2)
  runs = grid(settings(steps=STEPS), axes, learning_rates=rates, seeds=(0, 1), task=task)
  return sweep_of(tmp_path, runs)


FIRST, SECOND, THIRD = [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]


def finish(run):
  """Leaves the result of a run, as another process does."""
  with claim(run.cfg) as folder:
    folder.write_config(run.cfg)
    folder.append([groups.result_row(run, STEPS, {"accuracy": spec.rate_of(run)}, None)])


def test_group_that_another_process_trains_is_left_to_it(sweep, trained):
  said = []
  with claim(sweep.runs[6].cfg):
    outcome = training.train(sweep, say=said.append)
    claim(sweep.runs[4].cfg).__exit__()  # none of the group is locked
  assert trained(sweep) == [FIRST, THIRD] and not outcome.failures
  assert [known is None for known in outcome.scores] == [False] * 4 + [True] * 4 + [False] * 4
  line = "group 2 of 3: global_batch=4: another process trains it"
  assert line in said
  assert said[-1] == "other processes still train group 2 of 3: global_batch=4"
  assert None not in training.train(sweep, say=said.append).scores
  assert trained(sweep) == [FIRST, THIRD, SECOND]
  assert (
    "8 of 12 chosen runs are finished" in said and "group 2 of 3: global_batch=4, 4 runs" in said
  )


def test_runs_that_another_process_has_finished_meanwhile_are_not_trained(
  sweep, trained, monkeypatch
):
  measure, claim_one = Instant.measure, run_folder.claim

  def while_first_trains(self, *given):
    if self.group.first is sweep.runs[0]:
      for run in (*sweep.runs[4:8], sweep.runs[9]):
        finish(run)
    return measure(self, *given)

  def before_last_is_locked(cfg, **options):
    if cfg is sweep.runs[8].cfg:
      finish(sweep.runs[10])
    return claim_one(cfg, **options)

  monkeypatch.setattr(Instant, "measure", while_first_trains)
  monkeypatch.setattr(run_folder, "claim", before_last_is_locked)
  assert None not in training.train(sweep, say=quiet).scores
  assert trained(sweep) == [FIRST, [8, 11]]


def test_group_of_a_killed_process_is_trained_at_the_end(sweep, trained, monkeypatch, command):
  folder = RunFolder(sweep.runs[1].cfg.run_dir).path
  folder.mkdir(parents=True)
  hold = (
    "import fcntl, os, sys, time; place = os.open(sys.argv[1], os.O_RDONLY);"
    "fcntl.flock(place, fcntl.LOCK_EX); print(flush=True); time.sleep(60)"
  )
  holder = command("-c", hold, str(folder))
  holder.stdout.readline()
  measure = Instant.measure

  def kill(self, *given):
    holder.kill()
    holder.communicate()
    return measure(self, *given)

  monkeypatch.setattr(Instant, "measure", kill)
  assert None not in training.train(sweep, say=quiet).scores
  assert trained(sweep) == [SECOND, THIRD, FIRST]


def test_processes_at_the_same_time_train_each_run_once(sweep, trained, monkeypatch):
  measure, both = Instant.measure, threading.Barrier(2)

  def slow(self, *given):
    rows = measure(self, *given)
    time.sleep(0.02)
    return rows

  def process():
    both.wait()
    training.train(sweep, say=quiet)

  monkeypatch.setattr(Instant, "measure", slow)
  monkeypatch.setattr(training, "SAVE_SECONDS", 0.0)
  threads = [threading.Thread(target=process) for _ in range(2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert sorted(trained(sweep)) == [FIRST, SECOND, THIRD]
  assert None not in training.collect(sweep).scores
  assert not (sweep.folder / "unfinished").exists()


def test_processes_agree_about_groups_whatever_is_finished(sweep, trained, monkeypatch):
  """One was killed in a group; another run was finished before the next process started."""
  monkeypatch.setattr(training, "SAVE_SECONDS", 0.0)
  measure = Instant.measure

  def killed(self, *given):
    if self.step:
      raise Killed
    return measure(self, *given)

  some = dataclasses.replace(sweep, chosen=sweep.runs[:6])
  with monkeypatch.context() as patch:
    patch.setattr(Instant, "measure", killed)
    with claim(sweep.runs[0].cfg), pytest.raises(Killed):
      training.train(some, most=2, say=quiet)
  finish(sweep.runs[1])
  said = []
  training.train(some, most=2, say=said.append)
  assert trained(sweep) == [[2, 3], [0], [4, 5]]
  assert said[said.index("group 2 of 3: global_batch=2, 2 runs") + 1].startswith("resuming after")
  assert (sweep.folder / "unfinished").exists()  # other runs of the sweep may need it


def test_group_that_was_taken_over_has_no_results_of_the_former_process(sweep, monkeypatch):
  def taken_over(self):
    raise InUseError("another process")

  monkeypatch.setattr(RunFolder, "check", taken_over)
  some = dataclasses.replace(sweep, chosen=sweep.runs[:2])
  assert training.train(some, say=quiet).finished == 0


def test_text_is_prepared_by_one_process_at_a_time(tiny, tmp_path, trained):
  sweep = sweep_of(tmp_path / "sweep", text_runs(tiny))
  sweep.folder.mkdir()
  lock, said = RunLock(sweep.folder, quiet), []
  thread = threading.Thread(target=lambda: training.train(sweep, say=said.append))
  thread.start()
  while not said:
    time.sleep(0.01)
  assert said == ["another process prepares the text; waiting"] and trained(sweep) == []
  lock.close()
  thread.join()
  assert trained(sweep) == [[0, 1, 2, 3]]


def test_tables_are_written_again_if_more_is_finished(sweep, monkeypatch, capsys):
  write = tables.write

  def slowly(folder, runs, scores, tuning_seed):
    if scores[0] is None:
      finish(sweep.runs[0])
    return write(folder, runs, scores, tuning_seed)

  monkeypatch.setattr(tables, "write", slowly)
  command._write(sweep, quiet)
  rows = [json.loads(line) for line in (sweep.folder / "runs.jsonl").read_text().splitlines()]
  assert [row["finished"] for row in rows] == [True] + [False] * 11
  assert "11 of 12 runs of this table are not finished." in capsys.readouterr().out


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "sizes.py"
  path.write_text(FILE)
  return path


def test_command_starts_processes_and_writes_the_tables(file, tmp_path, monkeypatch, capsys):
  out, started = tmp_path / "out", []

  def run(line, count, say, stop):
    started.append((line, count))
    say("[1] a line")
    assert main(line[line.index("sweep") :]) == 0  # as a process does
    assert not (out / "table.md").exists()
    return None, []

  monkeypatch.setattr(processes, "run", run)
  arguments = ["sweep", str(file), "--out", str(out), "--only", "width=16", "--only", "size=a"]
  arguments += ["--set", "task.train_rows=16", "--copies", "2", "--processes", "3"]
  assert main(arguments) == 0
  ((line, count),) = started
  assert line[:4] == [sys.executable, "-m", "train", "sweep"] and count == 2  # as many as groups
  assert jax.config.jax_platforms == "cpu"
  printed = capsys.readouterr().out
  assert "[1] a line" in printed and printed.count("| width | size |") == 1
  assert "8 of 12 runs of this table are not finished." in (out / "table.md").read_text()
  monkeypatch.setattr(processes, "run", lambda *_: (None, ["process 1 of 2 ended with 3"]))
  assert main(arguments) == 1
  assert "failed: process 1 of 2 ended with 3" in capsys.readouterr().out


def test_command_prepares_text_before_processes_start(tiny, tmp_path, monkeypatch, config_file):
  folder, seen = tmp_path / "tokens", []
  config_file(tiny(data__folder=str(folder)), "one.py")
  path = tmp_path / "text.py"
  path.write_text(
    "from pathlib import Path\nfrom train.config import load_config\n"
    "SWEEP = [load_config(Path(__file__).parent / 'one.py')]\n"
  )

  def run(line, count, say, stop):
    seen.extend(sorted(file.name for file in folder.glob("*.bin")))
    return "SIGTERM", []

  monkeypatch.setattr(processes, "run", run)
  assert main(["sweep", str(path), "--out", str(tmp_path / "out"), "--processes", "2"]) == 0
  assert seen == ["train.bin", "validation.bin"]


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--processes", "0"], "--processes 0 must be at least 1; without it this process trains."),
    (["--processes", "2", "--dry-run"], "--processes 2 says .* and --dry-run trains nothing"),
    (["--processes", "2", "--collect"], "--processes 2 says .* and --collect trains nothing"),
  ],
)
def test_wrong_number_of_processes_is_one_line(file, tmp_path, arguments, message, capsys):
  assert main(["sweep", str(file), "--out", str(tmp_path / "out"), *arguments]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: ") and re.search(message, line)
  assert not (tmp_path / "out").exists()


MEMORY = "XLA_PYTHON_CLIENT_PREALLOCATE"


@pytest.mark.parametrize("memory", [None, "true"])
def test_lines_and_failures_of_processes_are_numbered(memory, monkeypatch):
  monkeypatch.delenv(MEMORY, raising=False)
  if memory:
    monkeypatch.setenv(MEMORY, memory)
  code = f"import os; print(os.environ[{MEMORY!r}]); raise SystemExit(3)"
  said = []
  stopped, failures = processes.run([sys.executable, "-S", "-c", code], 2, said.append)
  assert sorted(said) == [f"[{number}] {memory or 'false'}" for number in (1, 2)]
  assert stopped is None
  assert failures == [f"process {number} of 2 ended with exit status 3" for number in (1, 2)]


@pytest.mark.parametrize("code", [0, 1])
def test_signal_to_the_command_stops_its_processes(code):
  program = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(sys.argv[1])))"
    "; print('ready', flush=True); time.sleep(60)"
  )
  ready = []

  def say(line):
    ready.append(line)
    if len(ready) == 2:
      os.kill(os.getpid(), signal.SIGTERM)

  stopped, failures = processes.run([sys.executable, "-S", "-c", program, str(code)], 2, say)
  assert stopped == "SIGTERM" and len(failures) == 2 * code


@pytest.mark.slow
def test_two_processes_write_the_tables_of_one(file, tmp_path, command):
  """The whole command; afterwards it starts no process, and needs no accelerator."""
  file.write_text(file.read_text().replace("Recall(", "Recall(train_rows=8, test_rows=4, "))

  def run(name, *arguments, **environment):
    line = ("-m", "train", "sweep", str(file), "--out", str(tmp_path / name), *arguments)
    process = command(*line, **environment)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out

  both = ("--processes", "2")
  said = run("both", *both)
  for number in (1, 2, 3):
    assert sum(f"] group {number} of 3: " in x and "4 runs" in x for x in said.splitlines()) == 1
  assert "| width | size |" in run("both", *both, JAX_PLATFORMS="cuda")
  run("one")
  one, other = ((tmp_path / name / "runs.jsonl").read_text() for name in ("one", "both"))
  assert one.replace(str(tmp_path / "one"), "") == other.replace(str(tmp_path / "both"), "")


def test_group_that_does_not_fit_in_memory_is_halved(sweep, trained, monkeypatch):
  measure = Instant.measure

  def limited(self, *given):
    if self.group.first.cfg.global_batch == 4 and len(self.group.runs) > 1:
      raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while allocating.")
    if self.group.first.cfg.global_batch == 8:
      raise jax.errors.JaxRuntimeError("INTERNAL: something else.")
    return measure(self, *given)

  monkeypatch.setattr(Instant, "measure", limited)
  said = []
  outcome = training.train(sweep, say=said.append)
  assert trained(sweep) == [FIRST, *([run] for run in SECOND)]
  assert "out of memory with 4 runs; now 2 together" in said
  assert outcome.failures == ["global_batch=8: INTERNAL: something else."]
  assert [known is None for known in outcome.scores] == [False] * 8 + [True] * 4
