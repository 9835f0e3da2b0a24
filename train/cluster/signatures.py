"""Signatures of compiled programs, so that only those are executed which this user compiled.

A program in a file is code: whoever writes the file decides what its reader executes. A run folder
may come from others, with any file in it. So each program is signed, together with its name, by
HMAC-SHA-256 with a key that only this user can read, and that is not in any run:
`$XDG_CACHE_HOME/lnssm_jax/key`, or `~/.cache/lnssm_jax/key`. The signature of a file that JAX wrote
is next to it, `NAME.signature`; ours (`write`) begin with theirs. Where no key can be kept, another
process cannot tell whose programs they are, and compiles again.
"""

import contextlib
import functools
import hashlib
import hmac
import os
import secrets
import shutil
import stat
from pathlib import Path

from lnssm_jax.files import user_cache
from lnssm_jax.files.atomic import create, partial_name, replace_file, write_all
from lnssm_jax.files.reading import read_bytes

PROGRAM, SIGNATURE = ".program", ".signature"  # ends of our files
_OF_JAX = ("-cache", "-atime")  # and of JAX's
_SIZE = hashlib.sha256().digest_size
_MAX_BYTES = 1 << 34


def prepare(folder: Path, *, keep: bool) -> str | None:
  """Removes all programs in `folder` that this user has not signed.

  Args:
    keep: remove nothing, as other processes of the run may have other keys.

  Returns:
    Why JAX must not read programs there; None if it may.
  """
  try:
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
      return "it is a link or no folder"
    if found.st_uid != os.geteuid():
      return "it belongs to another user"
    if found.st_mode & 0o022:
      return "others may write there (chmod go-w allows its use)"
    for path in list(folder.iterdir()):
      if path.name.endswith((PROGRAM, *_OF_JAX)) and not _is_signed(path):
        if keep:
          return f"{path.name} is not signed by this user"
        _remove(path)
        _remove(_mark_of(path))  # the next file of that name has another
  except FileNotFoundError:  # removed by another process meanwhile
    return None
  except OSError as error:
    return f"{error.strerror or error}"
  return None


def sign_new(folder: Path) -> None:
  """Signs the files that JAX has written to `folder` since `prepare`."""
  with contextlib.suppress(OSError):
    for path in folder.glob(f"*{_OF_JAX[0]}"):
      mark = _mark_of(path)
      if not mark.exists():
        with contextlib.suppress(OSError, ValueError):
          replace_file(mark, _signature(path.name, read_bytes(path, _MAX_BYTES)))


def read(path: Path) -> bytes:
  """The program that `write` has written; empty if there is none with this user's signature."""
  try:
    content = read_bytes(path, _MAX_BYTES)
  except (OSError, ValueError):
    return b""
  program = content[_SIZE:]
  is_ours = hmac.compare_digest(content[:_SIZE], _signature(path.name, program))
  return program if is_ours else b""


def write(path: Path, program: bytes) -> None:
  """Writes a program, signed.

  Raises:
    OSError: it cannot be written.
  """
  replace_file(path, _signature(path.name, program) + program)


def _remove(path: Path) -> None:
  if path.is_dir() and not path.is_symlink():
    shutil.rmtree(path)
  else:
    path.unlink(missing_ok=True)


def _is_signed(path: Path) -> bool:
  if path.name.endswith(PROGRAM):
    return bool(read(path))
  try:
    content = read_bytes(path, _MAX_BYTES)
    if path.name.endswith(_OF_JAX[1]):  # the time of its last use
      return len(content) == 8
    mark = read_bytes(_mark_of(path), _SIZE)
  except (OSError, ValueError):
    return False
  return hmac.compare_digest(mark, _signature(path.name, content))


def _mark_of(path: Path) -> Path:
  return path.with_name(path.name + SIGNATURE)


def _signature(name: str, content: bytes) -> bytes:
  digest = hmac.new(_key(), f"{len(name)} {name}".encode(), hashlib.sha256)
  digest.update(content)
  return digest.digest()


@functools.cache
def _key() -> bytes:
  """The key of this user; of this process alone, if none can be kept."""
  try:
    path = user_cache.folder() / "key"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.path.lexists(path):
      _create_key(path)
    found = os.lstat(path)
    is_private = found.st_uid == os.geteuid() and not found.st_mode & 0o077
    if is_private and len(key := read_bytes(path, _SIZE)) == _SIZE:
      return key
  except (OSError, ValueError, RuntimeError):  # RuntimeError: there is no home
    pass
  return secrets.token_bytes(_SIZE)


def _create_key(path: Path) -> None:
  """Creates the key, whole, unless another process has done so."""
  partial = partial_name(path)
  try:
    with create(partial) as file:
      os.fchmod(file.fileno(), 0o600)
      write_all(file, secrets.token_bytes(_SIZE))
      os.fsync(file.fileno())
    with contextlib.suppress(FileExistsError):
      os.link(partial, path)
  finally:
    partial.unlink(missing_ok=True)
