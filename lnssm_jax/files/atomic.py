"""Files and folders that appear atomically, survive a power failure, and follow no links.

New content gets an unpredictable name, `NAME.<hex>.partial`, which never exists before. It is
synced, renamed, and the folder is synced: afterwards a power failure keeps the new content, before
that the old. A process that is killed leaves such a name; the next one that writes NAME removes it.
"""

import contextlib
import errno
import fcntl
import functools
import io
import itertools
import os
import re
import secrets
import shutil
import time
from collections.abc import Buffer, Callable, Iterator, Mapping
from pathlib import Path

from lnssm_jax.files import buckets
from lnssm_jax.files.reading import descriptor_of, retried

# Errors of file systems on which a folder cannot be synced.
_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}
_PART = 1 << 24  # bytes
_ABANDONED = 24 * 3600.0  # seconds without a change, where files have no locks


def partial_name(path: Path) -> Path:
  """A new name next to `path`."""
  return path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")


def create(path: Path) -> io.FileIO:
  """Creates a file for writing, unbuffered, and locks it for as long as it is open.

  Raises:
    OSError: something has that name, or it cannot be created.
  """
  while True:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)
    if _lock(file.fileno()):
      return file
    file.close()


def append_to(path: Path) -> io.FileIO:
  """Opens a regular file, which is created if missing, for appending, unbuffered.

  Raises:
    OSError: it is a link, folder, pipe or device, or cannot be written.
  """
  # For reading too: a pipe opened for writing alone would be waited for.
  flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
  return os.fdopen(descriptor_of(path, flags), "ab", buffering=0)


def write_all(file: io.FileIO, content: Buffer) -> None:
  """Writes all of `content` to an unbuffered file, however little a call takes."""
  view = memoryview(content)
  view = view.cast("B") if view.nbytes else view
  while view.nbytes:
    view = view[file.write(view) :]


def sync_file(file: io.FileIO) -> None:
  """Makes the content of a file of `create` durable.

  After an error that may be transient it is written once more: systems may take what a failed sync
  has lost for written.
  """

  attempts = itertools.count()

  def sync() -> None:
    size = os.fstat(file.fileno()).st_size if next(attempts) else 0
    for start in range(0, size, _PART):
      file.seek(start)
      write_all(file, os.pread(file.fileno(), _PART, start))
    os.fsync(file.fileno())

  retried(sync)


@contextlib.contextmanager
def named(path: str | Path) -> Iterator[None]:
  """Gives an OSError the path that it is about: a full disk names none, a partial file its own."""
  try:
    yield
  except OSError as error:
    if error.errno is None:
      raise
    raise OSError(error.errno, error.strerror, str(path)) from error


def replace_file(path: str | Path, content: bytes) -> None:
  """Writes a file, or replaces it, atomically and durably. A link at `path` is itself replaced.

  After an error that may be transient all of it is written again, for 2.6 seconds.

  Raises:
    OSError: it cannot be written, or is a folder; then it is unchanged. It names `path`.
  """
  replace_files({Path(path): content})


def replace_files(contents: Mapping[Path, bytes]) -> None:
  """`replace_file` for files of one folder, of which none is replaced before all are on disk."""
  retried(lambda: _replace(contents))


def _replace(contents: Mapping[Path, bytes]) -> None:
  partials = {path: partial_name(path) for path in contents}
  with contextlib.ExitStack() as opened:
    try:
      for path, partial in partials.items():
        with named(path):
          if path.is_dir() and not path.is_symlink():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
          remove_leftovers(path)
          file = opened.enter_context(create(partial))
          write_all(file, contents[path])
          os.fsync(file.fileno())
      for path, partial in partials.items():
        with named(path):
          partial.replace(path)
    finally:
      for partial in partials.values():
        with contextlib.suppress(OSError):
          partial.unlink(missing_ok=True)
  for folder in {path.parent for path in contents}:
    with named(folder):
      sync_folder(folder)


def write_output(path: str | Path, content: bytes) -> None:
  """Writes a file that a user names: atomically, at the target of a link, or into a device or pipe.

  Raises:
    OSError: it cannot be written; it names `path`.
  """
  with named(path):
    place = Path(path).resolve()
    if place.exists() and not place.is_file() and not place.is_dir():
      descriptor = os.open(place, os.O_WRONLY | os.O_CLOEXEC)
      with os.fdopen(descriptor, "wb", buffering=0) as file:
        write_all(file, content)
    else:
      replace_file(place, content)


@contextlib.contextmanager
def new_folder(path: str | Path, error: type[Exception]) -> Iterator[Path]:
  """Context with a temporary folder that is renamed to `path` once everything is on disk.

  It is removed after an exception. If `path` is in a bucket, it is then uploaded.

  Raises:
    error: `path` exists and is not an empty folder.
    OSError: the folder cannot be written.
    BucketError: the bucket cannot be written, or the address is of another kind.
  """
  address, path = path, buckets.local(path).absolute()
  if buckets.is_bucket(address):
    if buckets.Bucket(address).files():
      raise error(f"{address} exists already; use a folder that does not exist.")
    shutil.rmtree(path, ignore_errors=True)  # a copy of what was there before
  if os.path.lexists(path) and not (path.is_dir() and not path.is_symlink() and _is_empty(path)):
    raise error(f"{path} exists already; use a folder that does not exist.")
  make_folder(path.parent)
  hidden = path.with_name(f".{path.name}")
  remove_leftovers(hidden)
  partial = partial_name(hidden)
  partial.mkdir()
  descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
  try:
    _lock(descriptor)
    yield partial
    for inside, _, names in walk(partial):
      for name in names:
        _sync(Path(inside, name))
    sync_folders(partial)
    if buckets.is_bucket(address):
      buckets.publish(partial, address)
    partial.rename(path)
  except BaseException:
    shutil.rmtree(partial, ignore_errors=True)
    raise
  finally:
    os.close(descriptor)
  retried(functools.partial(sync_folder, path.parent))


@contextlib.contextmanager
def emptied_by_errors(folder: Path) -> Iterator[None]:
  """Removes the files of a folder that was empty, after an error, so that one can try again."""
  try:
    yield
  except BaseException:
    for path in folder.iterdir():
      path.unlink(missing_ok=True)
    raise


def make_folder(path: Path) -> None:
  """Creates a folder and its parents, unless they exist, durably.

  Raises:
    OSError: it is something else, or cannot be created.
  """
  missing = [place for place in (path, *path.parents) if not place.exists()]
  path.mkdir(parents=True, exist_ok=True)
  for place in missing:
    retried(functools.partial(sync_folder, place.parent))


def remove_leftovers(path: Path) -> None:
  """Removes partial files and folders for `path` whose processes have ended."""
  with contextlib.suppress(OSError):
    for name in _partial_names(path):
      _remove_abandoned(path.with_name(name))


def _partial_names(path: Path) -> list[str]:
  pattern = re.compile(re.escape(path.name) + r"\.([0-9a-f]{8}){1,2}\.partial")
  with os.scandir(path.parent) as entries:
    return [entry.name for entry in entries if pattern.fullmatch(entry.name)]


def is_being_replaced(path: Path) -> bool:
  """Whether a process has a partial file for `path` open, which it may just rename."""
  with contextlib.suppress(OSError):
    for name in _partial_names(path):
      descriptor = os.open(path.with_name(name), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
      try:
        if _is_open_elsewhere(descriptor):
          return True
      finally:
        os.close(descriptor)
  return False


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], object] = lambda: None) -> Iterator[None]:
  """Context for one process at a time that writes `path`; the others wait for it.

  The lock is on a hidden file next to `path`, which is removed at the end; the next process locks
  what a killed one has left. Where files have no locks, nobody waits.

  Args:
    waiting: called before waiting for another process.

  Raises:
    OSError: the file cannot be created.
  """
  file = path.with_name(f".{path.name}.lock")
  descriptor = _locked(file, waiting)
  try:
    yield
  finally:
    with contextlib.suppress(OSError):
      file.unlink()
    os.close(descriptor)


def _locked(file: Path, waiting: Callable[[], object]) -> int:
  """Descriptor of a lock file that has its name and, where there are locks, is locked."""
  while True:
    descriptor = descriptor_of(file, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK)
    try:
      try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        waiting()
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:  # no locks here
      return descriptor
    except BaseException:
      os.close(descriptor)
      raise
    if os.fstat(descriptor).st_nlink:
      return descriptor
    os.close(descriptor)  # the process before removed it


def sync_folder(path: str | Path) -> None:
  """Makes the names in a folder durable, on file systems that can.

  Raises:
    OSError: the disk has failed.
  """
  descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
  try:
    os.fsync(descriptor)
  except OSError as error:
    if error.errno not in _CANNOT_SYNC:
      raise
  finally:
    os.close(descriptor)


def sync_folders(folder: Path) -> None:
  """Makes the names in `folder` and all folders inside durable, from the bottom up."""
  for inside, _, _ in walk(folder, topdown=False):
    sync_folder(inside)


def walk(folder: Path, *, topdown: bool = True) -> Iterator[tuple[str, list[str], list[str]]]:
  """`os.walk`, which leaves nothing out: an OSError of any folder is raised."""

  def fail(error: OSError) -> None:
    raise error

  return os.walk(folder, topdown=topdown, onerror=fail)


def _remove_abandoned(path: Path) -> None:
  """Removes a partial file or folder unless a process has it open."""
  with contextlib.suppress(OSError):
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
      if not _is_open_elsewhere(descriptor):
        # While it is locked: `create` sees that its name is gone.
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
      os.close(descriptor)


def _is_open_elsewhere(descriptor: int) -> bool:
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return True
  except OSError:  # no locks here
    return time.time() - os.fstat(descriptor).st_mtime < _ABANDONED
  return False


def _lock(descriptor: int) -> bool:
  """Locks a new file against `_remove_abandoned`; returns whether it still has its name."""
  with contextlib.suppress(OSError):
    fcntl.flock(descriptor, fcntl.LOCK_EX)
  return os.fstat(descriptor).st_nlink > 0


def _is_empty(folder: Path) -> bool:
  return next(folder.iterdir(), None) is None


def _sync(path: Path) -> None:
  descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
