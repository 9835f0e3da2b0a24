"""Runs, token files and exported models in buckets, of which fsspec's memory plays one.

`tests/train/test_bucket_servers.py` has servers of the two protocols.
"""

import dataclasses
import errno
import json
import shutil
import time
from pathlib import Path
from unittest import mock

import fsspec
import jax
import numpy as np
import pytest

import lnssm_jax
from lnssm_jax.files import buckets
from lnssm_jax.files.atomic import new_folder
from lnssm_jax.files.buckets import Bucket, BucketError, local
from train.checkpoint import digests
from train.checkpoint.step_folders import CheckpointError
from train.cli import dry_run
from train.cli.errors import exit_code
from train.cli.main import main
from train.cluster import doctor
from train.data import in_bucket
from train.runs import bucket, export, loading
from train.runs.bucket import Mirror
from train.runs.run_folder import RunFolderError
from train.trainer import fit

RUN = "gs://lab/run"


@pytest.fixture
def machine(monkeypatch, tmp_path):
  """A function that makes this process one of another machine, with no local copies."""
  files = fsspec.filesystem("memory", skip_instance_cache=True)
  files.store.clear()
  files.pseudo_dirs[:] = [""]
  monkeypatch.setattr(fsspec, "filesystem", lambda *_, **__: files)
  monkeypatch.setattr(bucket, "PAUSES", (0.01,))
  monkeypatch.setattr(bucket, "_LOOK", 60.0)

  def become(name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))

  become("a")
  yield become
  files.store.clear()


def written(*steps):
  """The local copy of RUN, with small files in place of checkpoints."""
  folder = local(RUN)
  for step in steps:
    path = folder / "checkpoints" / str(step)
    path.mkdir(parents=True)
    (folder / "config.json").write_text('{"run": "1f", "run_dir": "gs://lab/run"}')
    (folder / "running.json").write_text("{}")
    (path / "array").write_text(f"of step {step}")
    digests.write(path, path.name)
  return folder


def uploaded(*steps, keep=3):
  mirror = Mirror(RUN, written(steps[0]), keep, mock.Mock())
  with mirror:
    mirror.flush()
    for step in steps[1:]:
      written(step)
      mirror.flush()
  return mirror


def steps_here():
  found = (local(RUN) / "checkpoints").iterdir()
  return sorted(path.name for path in found)


def test_other_machine_copies_the_newest_checkpoint_with_digests(machine):
  best = local(RUN) / "best" / "x"
  best.parent.mkdir(parents=True)
  best.write_text("y")
  mirror = uploaded(2, 4, 6, keep=3)
  assert Bucket(RUN).read("best/x") == b"y"
  best.unlink()
  written(8)
  mirror.flush()
  files = Bucket(RUN).files()
  assert {name.split("/")[1] for name in files if "/" in name} == {"4", "6", "8"}
  assert not files.keys() & {"running.json", "best/x"}
  Bucket(RUN).remove(["checkpoints/8/digests.json"])  # as of a process that was killed before it
  machine("b")
  folder = bucket.fetched(RUN)
  assert steps_here() == ["6"] and digests.damage(folder / "checkpoints" / "6") is None
  assert (folder / "config.json").exists()
  Bucket(RUN).write("checkpoints/6/array", b"of step 7")
  machine("c")
  with mock.patch.object(bucket, "warn") as warn:
    bucket.fetched(RUN)
  assert steps_here() == ["4", "6.damaged"]
  line = "gs://lab/run/checkpoints/6/ is damaged: the content of array has changed"
  assert warn.mock_calls[0].args == (line,)
  assert json.loads(Bucket(RUN).read("writer.json"))["ended"]
  with Mirror(RUN, written(5), 3, mock.Mock()) as mirror:  # the damaged one is trained again
    mirror.flush()
  assert {x.split("/")[1] for x in Bucket(RUN).files("checkpoints")} == {"4", "5"}
  for step in (4, 5):
    Bucket(RUN).write(f"checkpoints/{step}/array", b"damaged")
  machine("d")
  with pytest.raises(CheckpointError, match="no checkpoint in gs://lab/run is intact"):
    bucket.fetched(RUN)


def test_machine_that_wrote_last_continues_its_own_copy(machine):
  folder = uploaded(2)._folder
  written(4)
  assert bucket.fetched(RUN) == folder and steps_here() == ["2", "4"]
  shutil.rmtree(folder / "checkpoints")  # to free the disk
  assert bucket.fetched(RUN) == folder and steps_here() == ["2"]
  written(4)
  machine("b")
  bucket.fetched(RUN)
  (local(RUN) / "running.json").write_text("{}")
  with Mirror(RUN, local(RUN), 3, mock.Mock()):
    pass
  machine("a")
  bucket.fetched(RUN)
  assert steps_here() == ["2", "4.damaged"]


def test_one_machine_writes(machine, monkeypatch):
  monkeypatch.setattr(bucket, "STALE", 0.2)
  monkeypatch.setattr(bucket, "BEAT", 0.02)
  first = Mirror(RUN, written(2), 3, mock.Mock())
  first.flush()
  machine("b")
  written(2)
  renew = lambda _: first._renew()
  with (
    mock.patch.object(bucket.time, "sleep", renew),
    pytest.raises(RunFolderError, match=r"is training in gs://lab/run\. Wait for it"),
  ):
    Mirror(RUN, local(RUN), 3, mock.Mock())
  with Mirror(RUN, local(RUN), 3, mock.Mock()) as second:  # nobody renews it: taken over
    with pytest.raises(RunFolderError, match="has taken over gs://lab/run; this run ends"):
      first.flush()
    second.flush()
    with first, pytest.raises(RunFolderError, match="has taken over"):
      first.before_step(mock.Mock())
    writer = json.loads(Bucket(RUN).read("writer.json"))  # which the first one has left alone
    assert writer["id"] == second._mine["id"] and not writer["ended"]
  assert json.loads(Bucket(RUN).read("writer.json"))["id"] == second._mine["id"]


def test_writer_renews_its_file_and_uploads_nothing_twice(machine, monkeypatch):
  monkeypatch.setattr(bucket, "BEAT", 0.01)
  monkeypatch.setattr(bucket, "_LOOK", 0.001)
  (written(2) / "rows.partial").write_text("of a process that writes")
  with Mirror(RUN, local(RUN), 3, mock.Mock()) as mirror:
    mirror.flush()
    assert "rows.partial" not in Bucket(RUN).files()
    with mock.patch.object(Bucket, "upload", side_effect=AssertionError):
      mirror.flush()
    end = time.monotonic() + 20
    while json.loads(Bucket(RUN).read("writer.json"))["beat"] < 3 and time.monotonic() < end:
      time.sleep(0.002)
  assert json.loads(Bucket(RUN).read("writer.json"))["beat"] > 3


def test_checkpoint_that_is_deleted_while_it_is_fetched_is_passed_over(machine, monkeypatch):
  uploaded(2, 4)
  files = Bucket(RUN)._fs
  whole = files.get_file

  def get_file(source, target):
    if "/4/" in source:
      raise FileNotFoundError(source)
    whole(source, target)

  monkeypatch.setattr(files, "get_file", get_file)
  machine("b")
  bucket.fetched(RUN)
  assert steps_here() == ["2"]


def test_model_whose_files_keep_their_sizes_is_fetched_again(machine):
  for text in ("1", "2"):
    for name in ("config.json", "model.safetensors"):
      Bucket("s3://lab/model").write(name, text.encode())
    folder = buckets.fetched("s3://lab/model")
    assert {path.read_text() for path in folder.iterdir()} == {text}


def test_copy_of_another_run_is_not_mixed(machine):
  uploaded(2)
  Bucket(RUN).write("config.json", b'{"run": "2e", "run_dir": "gs://lab/run"}')
  Bucket(RUN).write("writer.json", b"{}")
  with pytest.raises(RunFolderError, match="is not of the run in gs://lab/run; remove that folder"):
    bucket.fetched(RUN)
  Bucket(RUN).remove(Bucket(RUN).files())
  with pytest.raises(RunFolderError, match="there is no run in gs://lab/run, but there is one in"):
    bucket.fetched(RUN)


def test_token_files_of_a_bucket_replaced_by_their_sidecar(machine, tmp_path):
  (tmp_path / "a.txt").write_text("some text of a file")
  arguments = f"tokenize --input {tmp_path}/a.txt --output s3://lab/data/set --tokenizer bytes"
  assert main(arguments.split()) == 0
  there = Bucket("s3://lab/data")
  assert there.files().keys() >= {"set.bin", "set.idx", "set.json"}
  machine("b")
  in_bucket.fetch("s3://lab/data", ["set"])
  place = local("s3://lab/data")
  assert (place / "set.bin").read_bytes() == there.read("set.bin")
  (tmp_path / "a.txt").write_text("other text of a file")
  machine("a")
  with mock.patch.object(Bucket, "upload", side_effect=BucketError("broken")):
    assert main([*arguments.split(), "--force"]) == 2
  assert "set.json" not in there.files()  # or the old one would count for new tokens
  assert main([*arguments.split(), "--force"]) == 0
  machine("b")
  in_bucket.fetch("s3://lab/data", ["set"])
  assert (place / "set.bin").read_bytes() == there.read("set.bin")
  assert (place / "set.json").read_bytes() == there.read("set.json")


def test_export_that_fails_leaves_nothing_in_the_bucket(machine):
  path = Bucket._path

  def fail(self, name):
    if name == "manifest.json":
      raise BucketError("broken")
    return path(self, name)

  def write():
    with new_folder("gs://lab/out", ValueError) as partial:
      (partial / "model.safetensors").write_text("x")
      (partial / "manifest.json").write_text("y")

  with mock.patch.object(Bucket, "_path", fail), pytest.raises(BucketError, match="broken"):
    write()
  assert Bucket("gs://lab/out").files() == {} and not local("gs://lab/out").exists()
  write()
  machine("b")
  assert (buckets.fetched("gs://lab/out") / "manifest.json").read_text() == "y"


def test_bucket_that_cannot_be_used_is_one_line(machine, tiny, capsys):
  for path in ("gs://", "gs://b/../x", "s3://.."):
    with pytest.raises(BucketError, match="is no folder of a bucket; use gs://BUCKET/FOLDER"):
      local(path)
  Bucket(RUN)._fs.pipe_file("lab/run/../../x", b"")
  with pytest.raises(BucketError, match="outside of it; remove it"):
    Bucket(RUN).files()
  missing, lines = "gs://lab/run needs the package gcsfs: pip install gcsfs", []
  with mock.patch.object(fsspec, "filesystem", side_effect=ImportError):
    for call in (fit, dry_run.describe):
      with pytest.raises(BucketError, match=missing):
        call(tiny(run_dir=RUN))
    doctor.examine(tiny(run_dir=RUN), lines.append)
    assert f"PROBLEM      {missing}" in lines
    assert main(["export", RUN, "--out", str(local(RUN))]) == 2
    assert capsys.readouterr().err == f"error: {missing}\n"
  doctor.examine(tiny(run_dir="gs://lab/new"), lines.append)
  assert "bucket       gs://lab/new, writable" in lines and Bucket("gs://lab/new").files() == {}


def test_empty_objects_that_stand_for_folders_are_no_files(machine):
  uploaded(2)
  for marker in ("lab/run/", "lab/run/checkpoints/2/"):
    Bucket(RUN)._fs.store[f"/{marker}"] = Bucket(RUN)._fs.store["/lab/run/config.json"]
  machine("b")
  bucket.fetched(RUN)
  assert steps_here() == ["2"]


def test_object_that_arrives_cut_is_fetched_again_and_never_taken(machine, monkeypatch):
  uploaded(2)
  files, cut = Bucket(RUN)._fs, []
  whole = files.get_file

  def get_file(source, target):
    whole(source, target)
    if source.endswith("array") and len(cut) < 5:
      cut.append(source)
      Path(target).write_bytes(Path(target).read_bytes()[:-1])

  monkeypatch.setattr(files, "get_file", get_file)
  machine("b")
  with pytest.raises(BucketError, match="arrived with 8 of 9 bytes") as found:
    bucket.fetched(RUN)
  assert exit_code(found.value) == 1 and not steps_here()
  bucket.fetched(RUN)  # the second attempt is cut twice more, and the checkpoint is not damaged
  assert steps_here() == ["2"] and len(cut) == 5


class Answer(Exception):
  """As gcsfs raises errors of HTTP, with its status."""

  def __init__(self, code):
    self.code = code


class NoCredentialsError(Exception):
  """As botocore's."""


def of_s3(status):
  """As s3fs raises errors of HTTP."""
  error = OSError(errno.EIO, "An error occurred")
  error.__cause__ = Answer(None)
  error.__cause__.response = {"ResponseMetadata": {"HTTPStatusCode": status}}
  return error


@pytest.mark.parametrize(
  ("error", "code"),
  [
    (Answer(503), 1),
    (Answer(429), 1),
    (Answer(401), 2),
    (of_s3(500), 1),
    (of_s3(400), 2),
    (PermissionError("Forbidden"), 2),
    (OSError("Forbidden: lab"), 2),
    (FileNotFoundError("The specified bucket does not exist"), 2),
    (OSError(errno.EREMOTEIO, "Internal Server Error"), 1),
    (OSError(errno.ENOSPC, "No space left on device"), 2),
    (ConnectionResetError("reset"), 1),
    (TimeoutError(), 1),
    (NoCredentialsError("Unable to locate\ncredentials"), 2),
    (ValueError("Invalid endpoint"), 2),
    (RuntimeError("Response payload is not completed"), 1),
  ],
)
def test_failure_of_a_network_has_another_exit_code_than_a_wrong_setting(machine, error, code):
  """With 2 a scheduler never starts a run again."""
  for place in ((fsspec, "filesystem"), (Bucket(RUN)._fs, "pipe_file")):
    with (
      mock.patch.object(*place, side_effect=error),
      pytest.raises(
        BucketError, match=rf"gs://lab/run cannot be used \({type(error).__name__}"
      ) as e,
    ):
      Bucket(RUN).write("a", b"")
    assert exit_code(e.value) == code and "\n" not in str(e.value)


@pytest.mark.slow  # two trainings; the servers' test has the same, where their packages are
def test_run_in_a_bucket_resumes_on_another_machine_bit_for_bit(machine, tiny, monkeypatch):
  monkeypatch.setattr(bucket, "_LOOK", 0.05)
  optimizer = dataclasses.replace(tiny().optimizer, schedule="constant")
  plan = {"checkpoint_every": 2, "keep_checkpoints": 2, "eval_every": 4, "optimizer": optimizer}
  whole = fit(tiny(steps=4, **plan)).state["params"]
  data = dataclasses.replace(tiny().data, folder="s3://lab/data")
  cfg = tiny(steps=4, run_dir=RUN, data=data, **plan)
  fit(dataclasses.replace(cfg, steps=2))
  there = Bucket(RUN).files()
  assert {"config.json", "metrics.jsonl", "checkpoints/2/digests.json"} <= there.keys()
  assert not [name for name in there if name.startswith(("programs", "running"))]

  machine("b")
  resumed = fit(cfg).state["params"]
  for ours, theirs in zip(jax.tree.leaves(resumed), jax.tree.leaves(whole), strict=True):
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
  rows = [json.loads(x) for x in Bucket(RUN).read("metrics.jsonl").splitlines()]
  assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4]

  machine("c")  # reads: a run, its export, its text
  assert loading.load_model(RUN).step == 4
  export.export_run(RUN, "gs://lab/exported")
  assert main(["evaluate", "--run-dir", RUN]) == 0
  assert main(["verify", RUN]) == 0
  with pytest.raises(ValueError, match="exists already"):
    export.export_run(RUN, "gs://lab/exported")
  machine("d")
  loaded = lnssm_jax.load_model("gs://lab/exported")
  assert loaded.step == 4 and loaded.tokenizer.spec == "bytes"
  assert Path(local(RUN)).exists() is False
