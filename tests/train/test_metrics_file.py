"""metrics.jsonl: rows that cannot be written, damaged rows, and how often it is read."""

import errno
import io
import json
import os

import pytest

from train import trainer
from train.runs import metrics_file
from train.runs.config_file import RunFolderError
from train.runs.metrics_file import MetricsFile
from train.runs.run_folder import RunFolder, claim


def row(step, **others):
  return {"kind": "train", "step": step, "loss": 1.0} | others


@pytest.fixture
def file(tmp_path):
  return MetricsFile(tmp_path / "metrics.jsonl")


class Disk(io.FileIO):
  """Takes so many bytes in all, and a few per call."""

  room = 0

  def write(self, content):
    count = min(len(content), 7, Disk.room)
    if not count:
      raise OSError(errno.ENOSPC, "No space left on device")
    Disk.room -= count
    return super().write(bytes(content[:count]))


@pytest.fixture
def disk(monkeypatch):
  """Returns a function that sets the room on the disk."""
  monkeypatch.setattr(metrics_file, "append_to", lambda path: Disk(path, "a+"))
  return lambda room: setattr(Disk, "room", room)


def test_rows_written_in_short_pieces_complete(file, disk):
  disk(1000)
  file.append([row(1), row(2)])
  assert file.read() == [row(1), row(2)]
  assert file.close() == 0


def test_rows_that_do_not_fit_kept_then_written_or_counted(file, disk):
  disk(90)
  file.append([row(1)])
  file.append([row(2)])  # some of its bytes fit
  file.append([row(3)])
  assert len(file.path.read_bytes().splitlines()) == 1
  disk(1000)
  file.append([row(4)])
  assert file.read() == [row(step) for step in (1, 2, 3, 4)]
  disk(10)
  file.append([row(5), row(6)])
  assert file.close() == 2


def test_row_cut_off_by_a_disk_that_fails_twice_leaves_no_damage(file, disk, monkeypatch):
  disk(90)
  file.append([row(1)])
  with monkeypatch.context() as patch:

    def truncate(self, size):
      raise OSError(errno.EIO, "Input/output error")

    patch.setattr(Disk, "truncate", truncate)
    file.append([row(2)])
  assert not file.path.read_bytes().endswith(b"\n")
  disk(1000)
  file.append([row(3)])
  assert file.read() == [row(1), row(2), row(3)]


def test_rows_lost_at_the_end_are_said(tiny, monkeypatch, capsys):
  with claim(tiny()) as run:
    monkeypatch.setattr(metrics_file, "append_to", lambda path: Disk(path, "a+"))
    Disk.room = 5
    run.append([row(1), row(2)])
  assert capsys.readouterr().err == (
    f"2 rows could not be written to {run.metrics_file} and are lost\n"
  )


def test_damaged_rows_put_aside_when_the_run_resumes(tiny, capsys):
  with claim(tiny()) as run:
    run.append([row(step) for step in range(1, 7)])
  lines = run.metrics_file.read_bytes().splitlines()
  lines[2] = lines[2].replace(b'"loss"', b'"los\xff"')
  lines[4] = b'{"kind": "train"}'
  run.metrics_file.write_bytes(b"\n".join([*lines, b'{"cut of']))
  with claim(tiny()) as run:
    assert [row["step"] for row in run.keep_rows_until(6)] == [1, 2, 4, 6]
    assert [row["step"] for row in run.read_rows()] == [1, 2, 4, 6]
  aside = run.path / "metrics.jsonl.damaged"
  assert aside.read_bytes() == b"\n".join([lines[2], lines[4], b""])
  said = capsys.readouterr().err
  assert f"line 3 of {run.metrics_file} is damaged (not UTF-8 at byte 33 (0xff))" in said
  assert "put aside into metrics.jsonl.damaged with 1 more" in said


def test_row_with_a_changed_digit_is_damaged_and_old_rows_have_no_checksum(file):
  file.append([row(1, loss=2.5), row(2, loss=2.5)])
  old = json.dumps(row(3)).encode() + b"\n"
  content = file.path.read_bytes().replace(b"2.5", b"2.4", 1) + old
  file.path.write_bytes(content)
  with pytest.raises(RunFolderError, match=r"line 1, is damaged \(its checksum is of other"):
    file.read()
  said = []
  assert file.keep_until(3, said.append) == [row(2, loss=2.5), row(3)]
  assert len(said) == 1 and file.read() == [row(2, loss=2.5), row(3)]


def test_rows_fewer_than_their_checkpoint_knows_are_said(file):
  file.append([row(step) for step in range(5)])
  said = []
  assert len(file.keep_until(3, said.append, count=4)) == 4 and said == []
  file.append([row(4), row(5)])
  assert file.count == 6
  file.path.unlink()
  file.keep_until(5, said.append, count=6)
  assert said == [f"{file.path} has 0 rows up to step 5, of 6: the others are lost"]


def test_rows_of_a_run_in_training_read_once(tiny, monkeypatch):
  inner, reads = MetricsFile._content, []

  def counted(self):
    reads.append(self.path)
    return inner(self)

  monkeypatch.setattr(MetricsFile, "_content", counted)
  cfg = tiny(eval_every=2)
  validation = trainer.fit(cfg).validation
  assert len(reads) == 1
  assert RunFolder(cfg.run_dir).evaluation(12, ["validation"]) == validation != []


def test_rows_synced_before_a_checkpoint(tiny, monkeypatch):
  with claim(tiny()) as run:
    run.write_config(tiny())
    run.append([row(1)])
    synced, fsync = [], os.fsync
    with monkeypatch.context() as patch:
      patch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_ino), fsync(fd)))
      run.before_checkpoint()
    assert synced == [run.metrics_file.stat().st_ino]


def test_run_folder_that_vanished_is_created_again_by_a_save(tiny, tmp_path, capsys):
  with claim(tiny()) as run:
    run.write_config(tiny())
    before = run.config_file.read_bytes()
    run.path.rename(tmp_path / "moved")
    run.append([row(1)])
    assert not run.path.exists()
    run.before_checkpoint()
    run.append([row(2)])
    assert run.config_file.read_bytes() == before
    assert run.read_rows() == [row(1), row(2)]
  assert f"{run.config_file} has vanished" in capsys.readouterr().err
