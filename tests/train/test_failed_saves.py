"""Saves that fail: the process still ends in time, a retry that can succeed does, one line each."""

import errno
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import chex
import jax.numpy as jnp
import pytest

from lnssm_jax.files import atomic, reading
from train.checkpoint import digests, saver, step_folders, store, verify
from train.checkpoint.step_folders import CheckpointError
from train.checkpoint.store import Checkpoints, newest_step
from train.cli.main import main
from train.cluster.stop_signal import StopSignal
from train.runs.loading import load_model
from train.runs.run_folder import RunFolder
from train.step.model import params_of

# What a process runs: `fit`, whose saves fail for a while in two ways, and then a signal.
FAILING = """
import os, resource, signal, sys
from pathlib import Path
from train.cli import process
from train.logging.metric_reader import MetricReader

folder, push = Path(sys.argv[1]) / "checkpoints", MetricReader.push
hidden, limit = folder.with_name("hidden"), resource.RLIMIT_FSIZE

def push_and_harm(self, step, metrics):
  push(self, step, metrics)
  if step == 12:  # no folder can be created
    folder.rename(hidden)
    folder.write_text("")
  elif step == 30:
    folder.unlink()
    hidden.rename(folder)
    resource.setrlimit(limit, (0, resource.RLIM_INFINITY))  # as on a full disk
  elif step == 50:
    resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    os.kill(os.getpid(), signal.SIGUSR1)

MetricReader.push = push_and_harm
sys.argv[1:] = ["fit", "--config", sys.argv[2], "--stopped-code", "75"]
process.run()
"""


@pytest.mark.slow
def test_failed_saves_run_that_is_stopped_exits_at_once_with_one_line_each(
  tiny, config_file, command
):
  only = {"data__validation": (), "data__sources": {"train": tiny().data.sources["train"]}}
  cfg = tiny(steps=100_000, checkpoint_every=5, eval_every=100_000, **only)
  process = command("-c", FAILING, cfg.run_dir, config_file(cfg), PYTHONUNBUFFERED="1")
  lines = []
  for line in process.stdout:
    lines.append(line)
    if line.startswith("stopped by SIGUSR1"):
      break
  begin = time.monotonic()
  try:
    _, errors = process.communicate(timeout=60)
  except subprocess.TimeoutExpired:
    process.kill()
    raise
  errors = [line for line in errors.splitlines() if not line.startswith("tokenize ")]
  assert (process.returncode, errors) == (75, [])
  assert time.monotonic() - begin < 20  # Orbax's patience is 300 s
  said = [line for line in lines if not line.startswith("step ")]
  failed = [line for line in said if "could not be written" in line]
  assert len(failed) >= 2 and len(said) < 2 * len(failed) + 12, "".join(said)
  (step,) = [int(line.split("step ")[1].split(";")[0]) for line in said if "saved." in line]
  assert newest_step(Path(cfg.run_dir) / "checkpoints") == step >= 50


def test_process_with_a_thread_that_never_ends_exits_with_its_code(command):
  code = """
import atexit, threading
from train.cli import process
atexit.register(print, "left in order")
threading.Thread(target=threading.Event().wait).start()
process.PATIENCE = 0.2
process.run(lambda: print("done", end=" ") or 7)
"""
  process = command("-c", code)
  out, errors = process.communicate(timeout=30)
  assert (process.returncode, out, errors) == (7, "done left in order\n", "")


@pytest.mark.parametrize(
  ("raised", "expected"), [("SystemExit('no')", "no\n"), ("OSError", "Trace")]
)
def test_process_that_raises_exits_with_1(raised, expected, command):
  process = command(
    "-c", f"from train.cli import process\ndef main(): raise {raised}\nprocess.run(main)"
  )
  errors = process.communicate(timeout=30)[1]
  assert process.returncode == 1 and errors.startswith(expected)


def test_process_broadcasts_although_its_user_forbids_it(command):
  """The setting is for the user's own arrays: a step of ours would end in a traceback."""
  code = """
from train.cli import process
def main():
  import jax
  print(jax.config.jax_numpy_rank_promotion)
process.run(main)
"""
  process = command("-c", code, JAX_NUMPY_RANK_PROMOTION="raise")
  assert process.communicate(timeout=60) == ("allow\n", "")


@pytest.fixture
def save_quickly(monkeypatch):
  """Saves without Orbax, which take no time."""

  class Written:
    def __init__(self, staging):
      self.staging = Path(staging)

    def result(self):
      (self.staging / "params").mkdir(parents=True)
      (self.staging / "params" / "x").write_text("x")

  monkeypatch.setattr(store.ocp, "save_checkpointables_async", lambda path, *_, **__: Written(path))
  monkeypatch.setattr(saver, "PAUSES", (0, 0, 0))
  monkeypatch.setattr(reading, "PAUSES", (0, 0, 0))


def finish(folder, step, keep=1):
  """Saves as the end of a run does; returns what was said."""
  said = []
  state = {"params": jnp.float32(0), "step": jnp.int32(step)}
  with Checkpoints(folder, keep=keep, say=said.append) as checkpoints:
    options = {"every": 100, "start": 0, "metadata": lambda step: {}, "say": said.append}
    saver.Saver(checkpoints, **options).finish(step, state)
  return said


def fail_once(monkeypatch, which):
  """Makes sync number `which` of this process fail; returns a list of all."""
  calls, sync = [], os.fsync

  def fsync(descriptor):
    calls.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    if len(calls) == which:
      raise OSError(errno.EIO, "Input/output error")
    sync(descriptor)

  monkeypatch.setattr(os, "fsync", fsync)
  return calls


def test_failed_saves_one_transient_error_of_any_sync_ends_no_run(
  save_quickly, tmp_path, monkeypatch
):
  finish(tmp_path / "whole", 1)
  with monkeypatch.context() as patch:
    calls = fail_once(patch, 0)
    finish(tmp_path / "whole", 2)  # deletes step 1
  assert len(calls) >= 6
  retried = 0
  for which in range(1, len(calls) + 1):
    folder = tmp_path / str(which)
    finish(folder, 1)
    with monkeypatch.context() as patch:
      fail_once(patch, which)
      retried += any("Retrying" in line for line in finish(folder, 2))
    assert step_folders.steps_in(folder) == [2]
    assert [path.name for path in folder.iterdir()] == ["2"]
    assert verify.report(folder)[1]
  assert 3 <= retried < len(calls)  # a file that can be written again is


@pytest.mark.parametrize("which", [1, 2])
def test_file_replaced_in_spite_of_a_transient_error_of_a_sync(which, tmp_path, monkeypatch):
  monkeypatch.setattr(reading, "PAUSES", (0, 0))
  calls = fail_once(monkeypatch, which)
  atomic.replace_file(tmp_path / "x", b"new")
  assert len(calls) == 2 + which and (tmp_path / "x").read_bytes() == b"new"
  assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_token_files_are_made_in_spite_of_a_transient_error_of_any_sync(tmp_path, monkeypatch):
  """Bytes that a failed sync may have lost are written again."""
  monkeypatch.setattr(reading, "PAUSES", (0, 0))
  monkeypatch.setattr(atomic, "_PART", 3)
  (tmp_path / "a.txt").write_text("some text")
  given = f"tokenize --input {tmp_path}/a.txt --tokenizer bytes --output {tmp_path}/".split()
  written = []

  def made(which):
    """Token files of a process in which one sync fails, and the syncs."""
    write_all = atomic.write_all
    with monkeypatch.context() as patch:
      calls = fail_once(patch, which)
      patch.setattr(atomic, "write_all", lambda *x: written.append(which) or write_all(*x))
      assert main([*given[:-1], f"{given[-1]}{which}/set"]) == 0
    names = ("set.bin", "set.idx", "set.crc32")
    return [(tmp_path / str(which) / name).read_bytes() for name in names], calls

  whole, calls = made(0)
  assert len(calls) >= 6 and all(made(n)[0] == whole for n in range(1, len(calls) + 1))
  again = [written.count(n) - written.count(0) for n, path in enumerate(calls, 1) if ".bin" in path]
  assert again == [-(-len(whole[0]) // 3)]


def test_checkpoints_may_be_a_link_to_a_folder_elsewhere(save_quickly, tmp_path):
  """On a larger disk: saves and deletions are there."""
  elsewhere, link = tmp_path / "elsewhere", tmp_path / "checkpoints"
  elsewhere.mkdir()
  link.symlink_to(elsewhere)
  for step in (1, 2):
    finish(link, step)
  assert link.is_symlink() and [path.name for path in elsewhere.iterdir()] == ["2"]
  assert newest_step(link) == 2 and verify.report(link)[1]


def test_failed_saves_a_retry_of_a_damaged_step_is_an_error(save_quickly, tmp_path, monkeypatch):
  """Only a folder that is whole is left as it is."""
  count = len(fail_once(monkeypatch, 0))
  sync = step_folders.sync

  def sync_and_damage(folder):
    if not count:
      (folder / "1" / "params" / "x").write_text("y")
      raise OSError(errno.EIO, "Input/output error")
    sync(folder)

  monkeypatch.setattr(step_folders, "sync", sync_and_damage)
  with pytest.raises(CheckpointError, match="step 1 could not be written"):
    finish(tmp_path, 1)


def test_failed_saves_of_another_process_are_not_waited_for(tmp_path, monkeypatch):
  """And its abandoned save, which ends later, removes nothing of the next one."""
  ends = {1: threading.Event(), 2: threading.Event()}

  class Written:
    def __init__(self, staging):
      self.staging = Path(staging)
      self.staging.mkdir(parents=True)

    def result(self):
      step = int(self.staging.stem)
      ends[step].wait(10)
      if step == 1:
        raise RuntimeError("the barrier")

  monkeypatch.setattr(store.ocp, "save_checkpointables_async", lambda path, *_, **__: Written(path))
  monkeypatch.setattr(store, "_LOOK", 0.01)
  said = []
  with Checkpoints(tmp_path, keep=1, say=said.append) as checkpoints:
    checkpoints.save(1, {"params": 0}, {})
    stuck = checkpoints._thread
    with monkeypatch.context() as patch:
      answers = iter([True, True])  # one runs, and one has failed
      patch.setattr(store.distributed, "any_of", lambda flag: next(answers, flag))
      checkpoints.save(2, {"params": 0}, {})
    assert said == [f"a save to {tmp_path} has failed in another process."]
    ends[1].set()
    stuck.shutdown()
    assert [path.name for path in tmp_path.iterdir()] == ["2.saving"]
    ends[2].set()
    checkpoints.wait()
  assert newest_step(tmp_path) == 2


@pytest.mark.parametrize(("processes", "free"), [(1, 2), (2, 30)])
def test_failed_saves_begin_in_no_process_if_one_has_too_few_descriptors(
  processes, free, tmp_path, monkeypatch
):
  """Orbax opens some before a barrier, at which it waits for the other processes."""
  begun, told = [], []
  monkeypatch.setattr(store.ocp, "save_checkpointables_async", lambda *_, **__: begun.append(1))
  monkeypatch.setattr(store.distributed, "any_of", lambda flag: told.append(flag) or flag)
  limit, limits = resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)
  with Checkpoints(tmp_path, keep=1) as checkpoints:
    os.close(lowest := os.open(os.devnull, os.O_RDONLY))
    monkeypatch.setattr(store.distributed, "count", lambda: processes)
    resource.setrlimit(limit, (lowest + free, limits[1]))
    try:
      checkpoints.save(1, {"params": 0}, {})
    finally:
      resource.setrlimit(limit, limits)
    assert "Too many open files" in str(checkpoints.failure())
  assert True in told and not begun


# One of two processes cannot save for a while; then it is told to stop.
FAILING_ALONE = """
import os, resource, signal, sys
from orbax.checkpoint.experimental.v1._src.saving import execution
from train.cli import process
from train.logging.metric_reader import MetricReader

harm, first, last, after = sys.argv[2], 12, 40, 60
push, begin = MetricReader.push, execution._run_blocking_save
failing = [False]

def push_and_harm(self, step, metrics):
  push(self, step, metrics)
  if os.environ["JAX_PROCESS_ID"] != ("0" if harm == "folders" else "1"):
    return
  if step in (first, last):
    failing[0] = step == first
    if harm != "folders":
      limit = resource.RLIMIT_FSIZE if harm == "files" else resource.RLIMIT_NOFILE
      hard = soft = resource.getrlimit(limit)[1]
      if failing[0]:
        soft = 0 if harm == "files" else len(os.listdir("/proc/self/fd")) + 8  # too few for Orbax
      resource.setrlimit(limit, (soft, hard))
  elif step == after:
    os.kill(os.getpid(), signal.SIGUSR1)

async def begin_or_fail(*args, **options):
  if failing[0] and harm == "folders":
    raise OSError(5, "Input/output error")
  return await begin(*args, **options)

if harm != "none":
  MetricReader.push, execution._run_blocking_save = push_and_harm, begin_or_fail
sys.argv[1:] = ["fit", "--config", sys.argv[1], "--stopped-code", "75"]
process.run()
"""


def in_two(command, config, harm):
  """(exit codes, what process 0 said) of a run in two processes."""
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    address = f"localhost:{probe.getsockname()[1]}"
  processes = [
    command(
      *("-W", "default", "-c", FAILING_ALONE, config, harm),
      JAX_COORDINATOR_ADDRESS=address,
      JAX_NUM_PROCESSES="2",
      JAX_PROCESS_ID=str(number),
    )
    for number in range(2)
  ]
  try:
    said, _ = [process.communicate(timeout=240)[0] for process in processes]
  finally:
    for process in processes:
      process.kill()
  return [process.returncode for process in processes], said


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["files", "descriptors", "folders"])
def test_failed_saves_of_one_of_two_processes_stop_neither_and_change_nothing(
  harm, tiny, config_file, command, tmp_path
):
  """A run that continues after them has the losses and the state of one without, bit for bit."""
  only = {"data__validation": (), "data__sources": {"train": tiny().data.sources["train"]}}
  options = {"steps": 120, "checkpoint_every": 5, "eval_every": 1000, "mesh__fsdp": 2, **only}
  whole, cfg = tiny(run_dir=str(tmp_path / "whole"), **options), tiny(**options)
  codes, said = in_two(command, config_file(whole, "whole.py"), "none")
  assert codes == [0, 0], said
  config = config_file(cfg)
  codes, said = in_two(command, config, harm)
  if harm == "folders":  # where Orbax lets the others wait
    assert codes[0] == 1 and codes[1] != 0
  else:
    assert codes == [75, 75], said
    failed = {
      "files": "has failed in another process",
      "descriptors": "has too few free descriptors",
    }
    assert failed[harm] in said and "training waits for the disk" not in said
    (step,) = [
      int(line.split("step ")[1].split(";")[0]) for line in said.split("\n") if "saved." in line
    ]
    assert newest_step(Path(cfg.run_dir) / "checkpoints") == step >= 60
  codes, said = in_two(command, config, "none")
  assert codes == [0, 0] and "resum" in said, said
  rows, wanted = (
    {row["step"]: (row["loss"], row["grad_norm"]) for row in RunFolder(x.run_dir).read_rows()}
    for x in (cfg, whole)
  )
  assert rows == wanted and len(rows) == 120
  params, want = (load_model(x.run_dir).model for x in (cfg, whole))
  chex.assert_trees_all_equal(*map(params_of, (params, want)), strict=True)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE])
@pytest.mark.parametrize("file", ["x", digests.FILE])
def test_checkpoint_that_may_not_be_read_is_not_damaged(
  file, code, save_quickly, tmp_path, monkeypatch
):
  finish(tmp_path, 1, keep=2)
  finish(tmp_path, 2, keep=2)
  before = sorted(path.name for path in tmp_path.iterdir())
  opened = digests.open_regular

  def open_regular(path, **options):
    if Path(path).name == file:
      raise OSError(code, os.strerror(code), str(path))
    return opened(path, **options)

  for module in (digests, reading):
    monkeypatch.setattr(module, "open_regular", open_regular)
  for read in (
    lambda: Checkpoints(tmp_path, keep=2).restore({"params": 0, "step": 0}),
    lambda: store.load(tmp_path, {"params": 0}),
    lambda: verify.report(tmp_path),
  ):
    with pytest.raises(CheckpointError, match=f"/[12] cannot be read .*{file}.* not mean"):
      read()
  assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_digests_leave_out_no_folder_that_cannot_be_listed(tmp_path, monkeypatch):
  (tmp_path / "1" / "a").mkdir(parents=True)
  (tmp_path / "1" / "a" / "x").touch()
  scandir = os.scandir

  def no_descriptors(path):
    if str(path).endswith("a"):
      raise OSError(errno.EMFILE, "Too many open files", str(path))
    return scandir(path)

  monkeypatch.setattr(os, "scandir", no_descriptors)
  for each in (
    lambda: digests.write(tmp_path / "1", "1"),
    lambda: digests.link_in(tmp_path / "1"),
    lambda: atomic.sync_folders(tmp_path / "1"),
  ):
    with pytest.raises(OSError, match="Too many open files"):
      each()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2], ids=lambda x: x.name)
def test_signals_of_schedulers_stop_a_run_as_sigterm_does(number):
  with StopSignal() as stop:
    os.kill(os.getpid(), number)
    assert stop.name == number.name
