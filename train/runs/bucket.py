"""Run folders in buckets: a run writes its local copy, which is uploaded with each checkpoint.

In the bucket a checkpoint counts once its digests.json is there, which is written last. Whoever
started last may write: `writer.json` in the bucket names that process, which looks there before
each checkpoint and renews the file every BEAT seconds. Another machine rejects to start while it is
renewed, and else takes over from the newest checkpoint in the bucket. The machine that wrote last
continues its own copy, which may be ahead.
"""

import contextlib
import json
import secrets
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any

from lnssm_jax.files import buckets
from lnssm_jax.files.atomic import replace_file
from lnssm_jax.files.buckets import Bucket, BucketError
from lnssm_jax.files.checked_json import parse
from lnssm_jax.files.printable import printable
from train.checkpoint import digests, step_folders
from train.checkpoint.step_folders import CheckpointError
from train.cluster import distributed
from train.loop import Callback, Moment
from train.messages import Say, first_line, warn
from train.runs.config_file import CONFIG, RunFolderError
from train.runs.run_lock import FILE as LOCK

WRITER, CHECKPOINTS = "writer.json", "checkpoints"
BEAT, STALE = 20.0, 90.0  # seconds
PAUSES = (1, 4, 16)  # seconds between attempts to upload at the end
_LOOK = 1.0  # seconds between two looks for a new checkpoint
_OF_THIS_MACHINE = (CHECKPOINTS, "programs", "kernels", LOCK, WRITER, "profile")


def fetched(path: str | Path) -> Path:
  """`local(path)` of a run or a model, with the newest intact checkpoint of the bucket, if later.

  Raises:
    RunFolderError: the copy is of another run than the bucket.
    CheckpointError: the bucket has checkpoints, and all are damaged.
    BucketError: the bucket cannot be read.
  """
  folder = buckets.local(path)
  if not buckets.is_bucket(path):
    return folder
  bucket = Bucket(path)
  steps, here = _committed(bucket), step_folders.steps_in(folder / CHECKPOINTS)
  if _wrote_last(bucket, folder) and steps[-1:] <= here[-1:]:  # whose copy has not been removed
    return folder
  content = bucket.read(CONFIG)
  if content is None or not (steps or "run_dir" in _object(content)):
    if here:
      raise RunFolderError(
        f"there is no run in {bucket.address}, but there is one in its local copy {folder}; remove"
        " that folder to start again, or copy it into the bucket."
      )
    return buckets.fetched(path) if bucket.files() else folder
  ours, theirs = digests.run_id(folder), _object(content).get("run")
  if ours not in (None, theirs):
    raise RunFolderError(
      f"the local copy {folder} is not of the run in {bucket.address}; remove that folder."
    )
  files = bucket.files()
  bucket.download(folder, filter(_is_shared, files))
  for step in reversed(steps):
    if _copy(bucket, folder, step, files):
      step_folders.set_aside_after(folder / CHECKPOINTS, step, warn)
      return folder
  if steps:
    raise CheckpointError(
      f"no checkpoint in {bucket.address} is intact; restore one from a backup, or use another"
      " run_dir."
    )
  return folder


def _copy(bucket: Bucket, folder: Path, step: int, files: dict[str, int]) -> bool:
  """Copies a checkpoint, unless it is here; returns whether it is intact, else renames it."""
  checkpoints, name = folder / CHECKPOINTS, f"{CHECKPOINTS}/{step}/"
  here, listed = checkpoints / str(step), bucket.read(name + digests.FILE)
  with contextlib.suppress(OSError):
    if (here / digests.FILE).read_bytes() == listed:
      return True
    step_folders.set_aside_after(checkpoints, step - 1, warn)
  staging = f".{step}.{secrets.token_hex(4)}"
  place = checkpoints / staging
  names = [x.removeprefix(name) for x in files if x.startswith(name)]
  try:
    Bucket(f"{bucket.address}/{name}").download(place, names)
  except BucketError as error:
    shutil.rmtree(place, ignore_errors=True)
    if isinstance(error.__cause__, FileNotFoundError):  # deleted meanwhile: there are newer ones
      return False
    raise
  with contextlib.suppress(OSError):  # another process was faster
    place.rename(here)
  shutil.rmtree(place, ignore_errors=True)
  wrong = digests.damage(here)
  if wrong is not None:
    warn(f"{bucket.address}/{name} is damaged: {wrong}")
    step_folders.set_aside_after(checkpoints, step - 1, warn)
  return wrong is None


def _committed(bucket: Bucket) -> list[int]:
  """Steps of the checkpoints with digests, in ascending order."""
  names = (name.split("/") for name in bucket.files(CHECKPOINTS))
  return sorted(int(x[1]) for x in names if x[2:] == [digests.FILE] and x[1].isdecimal())


def _is_shared(name: str) -> bool:
  """Whether a file other than those of checkpoints is in the bucket, too."""
  return name.split("/")[0] not in _OF_THIS_MACHINE and not name.startswith(".")


def _wrote_last(bucket: Bucket, folder: Path) -> bool:
  with contextlib.suppress(OSError):
    ours = _object((folder / WRITER).read_bytes()).get("id")
    return ours is not None and _writer(bucket).get("id") == ours
  return False


def _writer(bucket: Bucket) -> dict[str, Any]:
  return _object(bucket.read(WRITER))


def _object(content: bytes | None) -> dict[str, Any]:
  """The JSON object of a file; an empty one for anything else."""
  with contextlib.suppress(ValueError):
    found = parse(content or b"")
    return found if isinstance(found, dict) else {}
  return {}


class Mirror(Callback):
  """Uploads a run in training to `address`, in the background, from process 0.

  Args:
    folder: the local copy, which this process has locked.
    keep: checkpoints in the bucket.

  Raises:
    RunFolderError: another machine trains there, or the processes have different local copies.
    BucketError: the bucket cannot be reached.
  """

  def __init__(self, address: str, folder: Path, keep: int, say: Say):
    self._bucket, self._folder, self._keep, self._say = Bucket(address), folder, keep, say
    if distributed.any_of(not (folder / LOCK).exists()):
      raise RunFolderError(
        f"the processes have different local copies of {address}; set XDG_CACHE_HOME to a folder"
        " that all of them share."
      )
    host = printable(socket.gethostname(), 80)
    self._mine: dict[str, Any] = {"id": secrets.token_hex(8), "host": host, "ended": False}
    self._lost: str | None = None
    self._sent: dict[str, tuple[int, int]] = {}  # size and time of the files that were uploaded
    self._one = threading.Lock()
    self._ended = threading.Event()
    distributed.on_first(self._take)
    if distributed.is_first():
      self._thread = threading.Thread(target=self._work, name="bucket", daemon=True)
      self._thread.start()

  def __enter__(self) -> "Mirror":
    return self

  def __exit__(self, *_) -> None:
    self._ended.set()
    if distributed.is_first():
      self._thread.join()
      with contextlib.suppress(BucketError, RunFolderError):
        self._check()
        self._renew(ended=True)

  def before_step(self, now: Moment) -> None:
    if self._lost:
      raise RunFolderError(self._lost)

  def ended(self, now: Moment) -> None:
    distributed.on_first(self.flush)
    self._say(f"uploaded to {self._bucket.address}")

  diverged = ended

  def finished(self, now: Moment) -> None:
    distributed.on_first(self.flush)

  def flush(self) -> None:
    """Uploads everything, with several attempts.

    Raises:
      CheckpointError: all attempts failed.
    """
    for pause in (*PAUSES, None):
      try:
        self._upload()
        return
      except (BucketError, OSError) as error:
        what = f"{self._folder} could not be uploaded to {self._bucket.address} ({error})"
        if pause is None:
          raise CheckpointError(f"{what}; start again here, or copy that folder.") from error
        self._say(f"{what}; retrying in {pause} s")
        time.sleep(pause)

  def _take(self) -> None:
    """Becomes the writer, unless another machine is."""
    before = _writer(self._bucket)
    if before and not before.get("ended") and not _wrote_last(self._bucket, self._folder):
      host, end = printable(before.get("host"), 80), time.monotonic() + STALE
      self._say(f"{host} may be training in {self._bucket.address}; waiting up to {STALE:.0f} s")
      while end > time.monotonic():
        time.sleep(min(2.0, BEAT / 4))
        if (now := _writer(self._bucket)) != before and not now.get("ended"):
          raise RunFolderError(
            f"{host} is training in {self._bucket.address}. Wait for it, or use --set"
            " run_dir=ANOTHER."
          )
      self._say(f"{host} trained there and has ended; taking over")
    self._renew()
    replace_file(self._folder / WRITER, json.dumps(self._mine).encode())

  def _renew(self, ended: bool = False) -> None:
    self._mine |= {"ended": ended, "beat": self._mine.get("beat", 0) + 1}
    self._bucket.write(WRITER, json.dumps(self._mine).encode())

  def _check(self) -> None:
    found = _writer(self._bucket)
    if found.get("id") != self._mine["id"]:
      host = printable(found.get("host"), 80)
      self._lost = f"{host} has taken over {self._bucket.address}; this run ends without uploading."
      raise RunFolderError(self._lost)

  def _work(self) -> None:
    """The thread: uploads each new checkpoint, and renews the file of the writer."""
    done, renewed, failed = None, time.monotonic(), False
    while not self._ended.wait(_LOOK) and not self._lost:
      try:
        if time.monotonic() - renewed >= BEAT:
          self._check()
          self._renew()
          renewed = time.monotonic()
        newest = step_folders.newest_step(self._folder / CHECKPOINTS)
        if newest not in (None, done):
          self._upload()
          done = newest
        failed = False
      except RunFolderError:
        return
      except Exception as error:  # tried again, and at the end reported
        if not failed:
          self._say(f"not uploaded to {self._bucket.address}, tried again: {first_line(error)}")
        failed = True

  def _upload(self) -> None:
    """Uploads all files but checkpoints, then the newest checkpoint."""
    with self._one:
      self._check()
      self._upload_files()
      checkpoints = self._folder / CHECKPOINTS
      step = step_folders.newest_step(checkpoints)
      if step is not None:
        with step_folders.held(checkpoints, step) as held:
          if held.is_there():
            self._commit(step, held.path)
        self._remove_others(step)

  def _upload_files(self) -> None:
    """Uploads all changed files but checkpoints; removes those that are no longer here."""
    here = set()
    for path in self._folder.rglob("*"):
      name = path.relative_to(self._folder).as_posix()
      if not _is_shared(name) or path.suffix == ".partial" or not path.is_file():
        continue
      here.add(name)
      found = path.stat()
      state = found.st_size, found.st_mtime_ns
      if self._sent.get(name) != state:
        if path.parent == self._folder:
          self._bucket.write(name, path.read_bytes())  # it may grow meanwhile
        else:
          self._bucket.upload(self._folder, [name])
        self._sent[name] = state
    self._bucket.remove([x for x in self._bucket.files() if _is_shared(x) and x not in here])

  def _commit(self, step: int, path: Path) -> None:
    bucket, listed = Bucket(f"{self._bucket.address}/{CHECKPOINTS}/{step}"), digests.FILE
    there = bucket.read(listed)
    if there == (path / listed).read_bytes():
      return
    if there is not None:
      bucket.remove([listed])
    names = [x.relative_to(path).as_posix() for x in path.rglob("*") if x.is_file()]
    bucket.upload(path, [name for name in names if name != listed])
    self._check()
    bucket.upload(path, [listed])

  def _remove_others(self, newest: int) -> None:
    """Removes all but the newest checkpoints up to that step, their digests first.

    Later ones were damaged, and will be trained again.
    """
    files = self._bucket.files(CHECKPOINTS)
    kept = [step for step in _committed(self._bucket) if step <= newest][-self._keep :]
    name = lambda step: f"{CHECKPOINTS}/{step}/"
    old = [x for x in files if not x.startswith(tuple(map(name, kept)))]
    self._bucket.remove(old, first=[x for x in old if x.endswith(f"/{digests.FILE}")])
