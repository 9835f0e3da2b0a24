"""Two runs in one folder: noticed with and without locks of the file system."""

import contextlib
import json
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from train import trainer
from train.runs import run_lock
from train.runs.run_folder import RunFolderError, claim
from train.runs.run_lock import FILE, LockedError, RunLock


@pytest.fixture
def folder(tmp_path):
  return tmp_path


@pytest.fixture
def quick(monkeypatch):
  """Renewed every 0.05 s, ended after 0.6 s without."""
  monkeypatch.setattr(run_lock, "BEAT", 0.05)
  monkeypatch.setattr(run_lock, "STALE", 0.6)


def left_by(folder, **changes):
  """Leaves the file of a process; `changes` of this one."""
  owner = {"id": "0", **run_lock._this_process(), **changes}
  (folder / FILE).write_text(json.dumps(owner))
  return owner


def ended_process():
  """Number of a process that has ended."""
  with subprocess.Popen(["true"]) as child:
    pass
  return child.pid


@pytest.mark.usefixtures("without_flock")
def test_second_run_noticed_without_flock_and_named(tiny):
  with claim(tiny()), pytest.raises(RunFolderError) as caught:
    claim(tiny())
  assert f"another process is training in {tiny().run_dir}: process {os.getpid()} on " in str(
    caught.value
  )
  claim(tiny()).__exit__()  # it is free again
  assert not Path(tiny().run_dir, FILE).exists()


def test_second_run_noticed_by_flock_alone(folder):
  first = RunLock(folder, print)
  (folder / FILE).unlink()
  with pytest.raises(LockedError, match="another process is training"):
    RunLock(folder, print)
  first.close()
  RunLock(folder, print).close()


@pytest.mark.parametrize("changes", [{"process": None}, {"started": "1"}])
def test_lock_of_an_ended_process_here_taken_over_at_once(changes, folder):
  """Its number may belong to another process by now."""
  owner = left_by(folder, **({"process": ended_process()} if "process" in changes else changes))
  said = []
  lock = RunLock(folder, said.append)
  assert said == [
    f"process {owner['process']} on {owner['host']} trained in {folder} and has ended; taking over"
  ]
  assert json.loads((folder / FILE).read_text())["process"] == os.getpid()
  lock.close()
  assert list(folder.iterdir()) == []


def test_names_in_the_file_of_a_lock_are_shown_printable_and_short(folder):
  host = "\x1b]0;title\x07\x1b[2J\rerror: all is well\n" + "x" * 10_000
  left_by(folder, host=host, process=ended_process())
  said = []
  with contextlib.closing(RunLock(folder, said.append)):
    left_by(folder, host=host, process=host)
    with pytest.raises(LockedError, match="another process is training in") as error:
      RunLock(folder, print)
  for line in (*said, str(error.value)):
    assert r" on \x1b]0;title\x07\x1b[2J\rerror: all is well\n" in line
    assert line.isprintable() and len(line) < 600


@pytest.mark.usefixtures("quick")
def test_lock_of_a_silent_process_elsewhere_taken_over_after_a_while(folder):
  left_by(folder, machine="another", host="node7", process=5)
  said, begin = [], time.monotonic()
  RunLock(folder, said.append).close()
  assert time.monotonic() - begin > 0.4
  assert said == [
    f"process 5 on node7 may be training in {folder}; waiting up to 1 s",
    f"process 5 on node7 trained in {folder} and has ended; taking over",
  ]
  left_by(folder, machine="another")
  os.utime(folder / FILE, (1e9, 1e9))  # silent for long: no need to wait
  RunLock(folder, said.append).close()
  assert len(said) == 3 and said[2].endswith("has ended; taking over")


@pytest.mark.usefixtures("quick")
def test_lock_that_is_renewed_elsewhere_respected(folder, monkeypatch):
  monkeypatch.setattr(run_lock, "STALE", 30.0)
  left_by(folder, machine="another", process=5)
  stop = threading.Event()

  def renew():
    while not stop.wait(0.05):
      os.utime(folder / FILE)

  thread = threading.Thread(target=renew)
  thread.start()
  with pytest.raises(LockedError, match="process 5 on"):
    RunLock(folder, print)
  stop.set()
  thread.join()
  assert json.loads((folder / FILE).read_text())["process"] == 5


@pytest.mark.usefixtures("quick")
def test_lock_renewed_by_its_owner(folder):
  lock = RunLock(folder, print)
  os.utime(folder / FILE, (1e9, 1e9))
  end = time.monotonic() + 5
  while (folder / FILE).stat().st_mtime == 1e9 and time.monotonic() < end:
    time.sleep(0.01)
  assert (folder / FILE).stat().st_mtime > 1e9
  (folder / FILE).unlink()  # someone cleans up
  while not (folder / FILE).exists() and time.monotonic() < end:
    time.sleep(0.01)
  assert (folder / FILE).exists()
  lock.check()
  lock.close()


@pytest.mark.usefixtures("quick")
def test_run_whose_folder_was_renamed_and_taken_says_so(folder):
  lock = RunLock(folder, print)
  folder.rename(folder.with_name("renamed"))
  folder.mkdir()
  left_by(folder, id="1", process=77)
  end = time.monotonic() + 5
  while lock._lost is None and time.monotonic() < end:
    time.sleep(0.01)
  with pytest.raises(LockedError, match=r"was renamed or removed, and process 77 on .* trains in"):
    lock.check()
  lock.close()


@pytest.mark.usefixtures("quick")
def test_run_that_was_taken_over_ends_without_saving(tiny, monkeypatch):
  push, seen = trainer.MetricReader.push, []

  def push_slowly(self, step, metrics):
    push(self, step, metrics)
    if step == 3:
      left_by(self._run.path, id="1", process=77)
      while self._run._lock._lost is None:
        time.sleep(0.01)
    seen.append(step)

  monkeypatch.setattr(trainer.MetricReader, "push", push_slowly)
  cfg = tiny(data__validation=(), data__sources={"train": tiny().data.sources["train"]})
  with pytest.raises(RunFolderError, match=r"process 77 on .* has taken over .*without saving"):
    trainer.fit(cfg)
  assert seen == [1, 2, 3]
  assert trainer.store.newest_step(Path(cfg.run_dir, "checkpoints")) is None
  assert json.loads(Path(cfg.run_dir, FILE).read_text())["process"] == 77


def test_lock_that_someone_took_meanwhile_not_removed(folder):
  """Two processes find the file of an ended one; the slower must not remove that of the faster."""
  ended = left_by(folder, process=ended_process())
  slower = RunLock.__new__(RunLock)
  slower._path = folder
  faster = RunLock(folder, print)
  slower._put_aside(ended)
  assert json.loads((folder / FILE).read_text())["process"] == os.getpid()
  faster.check()
  faster.close()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("content", ["", "[]", "{}", '{"process": "x"}'])
def test_unreadable_lock_taken_over(content, folder):
  (folder / FILE).write_text(content)
  said = []
  RunLock(folder, said.append).close()
  assert "taking over" in said[-1]
