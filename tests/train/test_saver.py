"""Saves on a full disk: training continues, reports it, and saves when possible."""

import errno
import resource
from pathlib import Path

import pytest

from train import trainer
from train.checkpoint import digests, saver
from train.checkpoint.store import CheckpointError, newest_step
from train.loop import Moment
from train.runs.run_folder import RunFolder, claim


def quick(tiny, **changes):
  """Config of a run without validation and generation, for fewer compilations."""
  sources = {"train": tiny().data.sources["train"]}
  return tiny(data__validation=(), data__sources=sources, **changes)


def fail_saves(monkeypatch, steps):
  """Makes the saves of `steps` fail as on a full disk; returns the attempted steps."""
  write, tried = digests.write, []

  def full(folder, name):
    tried.append(int(name))
    if int(name) in steps:
      raise OSError(28, "No space left on device")
    write(folder, name)

  monkeypatch.setattr(digests, "write", full)
  return tried


def test_saver_without_descriptors_for_the_folder_does_not_raise(tmp_path, monkeypatch):
  leftover = tmp_path / "5.saving"
  leftover.mkdir()
  with monkeypatch.context() as patch:

    def too_many(path):
      raise OSError(errno.EMFILE, "Too many open files")

    patch.setattr(Path, "iterdir", too_many)
    with trainer.Checkpoints(tmp_path, keep=1):
      assert leftover.exists()
  with trainer.Checkpoints(tmp_path, keep=1):
    assert not leftover.exists()


@pytest.mark.slow
def test_saver_failed_saves_retried_while_training(tiny, monkeypatch, capsys):
  cfg = quick(tiny, checkpoint_every=4)
  tried = fail_saves(monkeypatch, {4, 12})
  monkeypatch.setattr(saver, "PAUSES", (0.01, 0.02))
  init, push, made = trainer.Checkpoints.__init__, trainer.MetricReader.push, []

  def remember(self, *arguments, **options):
    init(self, *arguments, **options)
    made.append(self)

  def wait_and_push(self, step, metrics):
    if step == 5:  # the save of step 4 has failed by now
      made[0]._pending.exception()
    push(self, step, metrics)

  monkeypatch.setattr(trainer.Checkpoints, "__init__", remember)
  monkeypatch.setattr(trainer.MetricReader, "push", wait_and_push)
  with pytest.raises(CheckpointError, match=r"step 12 could not be written.*No space left"):
    trainer.fit(cfg)
  assert tried == [4, 8, 12, 12, 12]
  assert newest_step(RunFolder(cfg.run_dir).checkpoints) == 8
  out = capsys.readouterr().out
  assert "the checkpoint of step 4 could not be written" in out
  assert "No space left on device" in out
  assert "training continues; the next save is attempted after step 8" in out
  assert "Retrying in 0.02 s." in out


class Checkpoints:
  """Saves fail while `full`."""

  def __init__(self):
    self.full, self.saved, self._error = True, [], None

  def save(self, step, state, metadata):
    del state
    assert metadata == {"position": step}
    self._error = CheckpointError("full") if self.full else None
    self.saved.append(step)

  def failure(self):
    error, self._error = self._error, None
    return error

  def idle(self):
    return True


def test_saver_retries_after_2_4_8_steps():
  checkpoints, said = Checkpoints(), []
  policy = saver.Saver(
    checkpoints, every=20, start=0, metadata=lambda step: {"position": step}, say=said.append
  )
  for step in range(1, 141):
    now = Moment(step, None)
    policy.before_step(now)
    policy.after_step(now)
    policy.paused(now)
    checkpoints.full = step < 75 or step == 99
  assert checkpoints.saved == [20, 23, 28, 37, 40, 60, 80, 100, 103, 120, 140]
  assert said[:2] == ["full", "training continues; the next save is attempted after step 23"]


def test_rows_on_full_disk_kept_until_written(tiny):
  with claim(tiny()) as run:
    row = lambda step: {"kind": "train", "step": step, "loss": 1.0}
    run.append([row(1)])
    size = run.metrics_file.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
    try:
      run.append([row(2)])  # ten bytes of it would fit
      assert run.metrics_file.stat().st_size == size
      run.append([row(3)])
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, before)
    run.append([row(4)])
    assert run.read_rows() == [row(step) for step in (1, 2, 3, 4)]
