"""Commands that read a run while it saves and deletes checkpoints."""

import errno
import os
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from lnssm_jax.files import reading
from train.checkpoint import digests, step_folders, store, verify
from train.checkpoint.step_folders import CheckpointError, DeletedError, steps_in
from train.checkpoint.store import Checkpoints
from train.inspection import report


def state(step):
  return {"params": {"w": jnp.full((4, 4), step, jnp.float32)}, "step": jnp.int32(step)}


def load(folder, **options):
  describe = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
  return store.load(folder, {"params": jax.tree.map(describe, state(0)["params"])}, **options)


def save(folder, *steps, keep=9):
  with Checkpoints(folder, keep=keep) as checkpoints:
    for step in steps:
      checkpoints.save(step, state(step), {"data_position": step})
      checkpoints.wait()


@pytest.fixture
def saved(tmp_path):
  """The folder of checkpoints 3 and 7."""
  save(tmp_path / "run" / "checkpoints", 3, 7)
  return tmp_path / "run" / "checkpoints"


@pytest.fixture
def meanwhile(monkeypatch):
  """Returns a function that runs `action(step)` once, when a reader comes to a checkpoint."""

  def at(owner, name, action):
    inner, done = getattr(owner, name), []

    def call(folder, *arguments, **options):
      if not done:
        done.append(folder)
        action(folder)
      return inner(folder, *arguments, **options)

    monkeypatch.setattr(owner, name, call)

  return at


def advance(folder):
  """The next save of a run, for which `folder` has become too old."""
  save(folder.parent, 9)
  shutil.rmtree(folder)


def test_reader_keeps_its_checkpoint_while_the_run_saves(saved):
  with step_folders.newest_held(saved, print) as step:
    assert step.number == 7
    save(saved, 9, keep=1)
    assert steps_in(saved) == [7, 9]
    with step_folders.newest_held(saved, print) as newer:
      assert newer.number == 9
  step_folders.keep_newest(saved, 1)
  assert steps_in(saved) == [9]


@pytest.mark.usefixtures("without_flock")
@pytest.mark.parametrize("owner, name", [(digests, "damage"), (store, "_read_once")])
def test_reader_without_locks_takes_the_next_newest(owner, name, saved, meanwhile, capsys):
  meanwhile(owner, name, advance)
  trees, step, _ = load(saved)
  assert (step, float(trees["params"]["w"][0, 0])) == (9, 9.0)
  assert capsys.readouterr().err == ""  # nothing is damaged


@pytest.mark.usefixtures("without_flock")
def test_reader_of_a_given_step_learns_that_it_was_deleted(saved, meanwhile):
  meanwhile(digests, "damage", advance)
  with pytest.raises(DeletedError, match=r"checkpoint .*/7 was deleted by its run while"):
    load(saved, step=7)


@pytest.mark.usefixtures("without_flock")
def test_reader_gives_up_when_every_step_is_deleted(saved, monkeypatch):
  def deleted(path, *_):
    step = step_folders.Step(path)
    save(saved, step.number + 1)
    shutil.rmtree(path)
    step.check_there()

  monkeypatch.setattr(store, "_TRIES", 3)
  monkeypatch.setattr(store, "_read", deleted)
  with pytest.raises(CheckpointError, match="increase keep_checkpoints"):
    load(saved)
  assert steps_in(saved) == [3, 10]


@pytest.mark.usefixtures("without_flock")
@pytest.mark.parametrize("name", ["damage", "size"])
def test_verify_never_calls_a_deleted_step_damaged(name, saved, meanwhile):
  meanwhile(digests, name, shutil.rmtree)
  lines, whole = verify.report(saved)
  assert whole and [line.split()[:3] for line in lines] == [["step", "7", "intact,"]]


@pytest.mark.usefixtures("without_flock")
def test_verify_when_all_steps_are_replaced_reports_the_new_ones(saved, meanwhile):
  def all_new(folder):
    for step in (3, 7):
      shutil.rmtree(folder.parent / str(step))
    save(folder.parent, 11)

  meanwhile(digests, "damage", all_new)
  lines, whole = verify.report(saved)
  assert whole and lines[0].startswith("step 11  intact")


def test_steps_listed_while_one_is_deleted(saved, monkeypatch):
  monkeypatch.setattr(step_folders, "_is_step", lambda path: path.name.isdecimal())
  inner = step_folders._is_empty

  def late(path):
    if path.name == "3":
      shutil.rmtree(path)
    return inner(path)

  monkeypatch.setattr(step_folders, "_is_empty", late)
  assert steps_in(saved) == [7]


@pytest.mark.usefixtures("without_flock")
@pytest.mark.parametrize("owner, name", [(digests, "damage"), (report.OrbaxArrays, "kind")])
def test_inspect_of_a_deleted_step_shows_the_next_newest(owner, name, saved, meanwhile):
  (saved.parent / "config.json").write_text('{"data": {}}')

  def newer(what):
    advance(what if isinstance(what, type(saved)) else what.folder.parent)

  meanwhile(owner, name, newer)
  found = report.report(saved.parent)
  assert found["step"] == 9
  assert all("DAMAGED" not in row["state"] for row in found["steps"])
  assert found["parameters"][0]["largest"] == 9.0


def test_inspect_holds_its_step(saved, meanwhile):
  (saved.parent / "config.json").write_text('{"data": {}}')
  meanwhile(report, "statistics", lambda array: save(saved, 9, keep=1))
  assert report.report(saved.parent)["step"] == 7
  assert steps_in(saved) == [7, 9]


def failing(monkeypatch, count, number):
  """Makes the next `count` reads of a checkpoint fail with error `number`; returns those left."""
  inner, left = digests.open_regular, [number] * count

  def broken(path, **options):
    if left and "params" in str(path):
      raise OSError(left.pop(), os.strerror(number))
    return inner(path, **options)

  monkeypatch.setattr(reading, "PAUSES", (0, 0, 0))
  monkeypatch.setattr(digests, "open_regular", broken)
  return left


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_transient_read_error_is_no_damage(number, saved, monkeypatch):
  left = failing(monkeypatch, 2, number)
  assert digests.damage(saved / "7") is None
  assert left == []


def test_lasting_read_error_is_damage(saved, monkeypatch):
  failing(monkeypatch, 1000, errno.EIO)  # without the right to read: test_failed_saves.py
  assert "cannot be read" in digests.damage(saved / "7")


def test_transient_error_of_orbax_retried(saved, meanwhile):
  def fail(_):
    raise OSError(errno.EIO, "Input/output error")

  meanwhile(store, "_read_once", fail)
  assert load(saved)[1] == 7


@pytest.mark.slow
def test_readers_of_a_run_that_saves_all_the_time_never_fail(saved, capsys):
  """Without Orbax on the writing side, whose threads are for one caller in a process."""
  content, done = saved.parent / "content", threading.Event()
  (saved / "7").rename(content)
  (content / digests.FILE).unlink()

  def train():
    for step in range(8, 100_000):
      staging = saved / f"{step}{step_folders.SAVING}"
      shutil.copytree(content, staging)
      step_folders.publish(staging, step)
      step_folders.keep_newest(saved, 1)
      if done.is_set():
        return

  run = threading.Thread(target=train)
  run.start()
  try:
    seen, end = [], time.monotonic() + 60
    while len(set(seen)) < 4 and time.monotonic() < end:
      trees, step, _ = load(saved)
      assert float(trees["params"]["w"][0, 0]) == (3.0 if step == 3 else 7.0)
      lines, whole = verify.report(saved)
      assert whole, lines
      seen.append(step)
  finally:
    done.set()
    run.join()
  assert capsys.readouterr().err == ""
  assert len(set(seen)) == 4  # it did save
