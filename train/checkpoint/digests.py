"""SHA-256 digests of every file of a folder, which detect damage before anything is loaded.

`digests.json` is stored in the folder itself:

    {"folder": "1500", "run": "5f…", "files": {"params/d/9f…": {"bytes": 404, "sha256": "…"}},
     "sha256": "…"}

`folder` binds the files to their step and `run` to their run, by the id in its config.json: intact
files of another checkpoint are wrong too. Without an id, as in runs of older versions, the run is
not compared. The last entry is the digest of the others.
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from lnssm_jax.files.atomic import replace_file, sync_folders, walk
from lnssm_jax.files.reading import digest_of, open_regular, read_json, retried

FILE = "digests.json"
# Errors of this process, its rights or its limits, which say nothing about a file.
NO_ACCESS = {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_MAX_BYTES = 1 << 30  # of digests.json
_THREADS = 8  # hashing releases the GIL; about 2 GB/s per core


def write(folder: Path, name: str) -> None:
  """Writes the digests of all files in `folder`, which will be renamed to `name`.

  The files are synced to disk first, then their names, then the digests.

  Raises:
    OSError: a file cannot be read, or the digests cannot be written.
  """
  paths = sorted(_files(folder))
  with ThreadPoolExecutor(_THREADS) as pool:
    entries = list(pool.map(lambda path: _entry(folder / path, flush=True), paths))
  run = run_id(folder.absolute().parent.parent)
  content: dict[str, Any] = {"folder": name} | ({} if run is None else {"run": run})
  content["files"] = dict(zip(paths, entries, strict=True))
  text = json.dumps(content | {"sha256": digest_of(content)}, indent=1)
  sync_folders(folder)
  replace_file(folder / FILE, f"{text}\n".encode())


def damage(folder: Path, parts: Iterable[str] | None = None, *, content: bool = True) -> str | None:
  """Describes the first damage found in `folder`; None if every file is as it was written.

  Reads every byte. Files added later are ignored, except links, which could point anywhere.

  Args:
    parts: check only these subfolders, and the files at the top level.
    content: False compares only which files there are and how long they are.

  Raises:
    OSError: this process may not read a file now (`NO_ACCESS`), which is no damage.
  """
  try:
    link = link_in(folder)
    if link is not None:
      return f"{link} is a link; links are not followed"
    files = _read(folder)
    if parts is not None:
      wanted = tuple(f"{part}/" for part in parts)
      files = {n: files[n] for n in files if "/" not in n or n.startswith(wanted)}
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
    _raise_without_access(error)
    return _why_unreadable(error)

  def check(item: tuple[str, dict[str, Any]]) -> str | None:
    name, written = item
    try:
      found = retried(lambda: _entry(folder / name) if content else _size(folder / name))
    except FileNotFoundError:
      return f"{name} is missing"
    except OSError as error:
      _raise_without_access(error)
      return f"{name} cannot be read ({error.strerror or error})"
    if found["bytes"] != written["bytes"]:
      return f"{name} has {found['bytes']} bytes instead of {written['bytes']}"
    same = not content or found == written
    return None if same else f"the content of {name} has changed"

  with ThreadPoolExecutor(_THREADS) as pool:
    wrong = [line for line in pool.map(check, files.items()) if line]
  more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
  return wrong[0] + more if wrong else None


def size(folder: Path) -> tuple[int, int]:
  """Number of files that the digests of an intact `folder` list, and their total bytes."""
  files = _read(folder)
  return len(files), sum(entry["bytes"] for entry in files.values())


def link_in(folder: Path) -> str | None:
  """Relative path of the first symbolic link in `folder` (or "the folder"); None without any."""
  if folder.is_symlink():
    return "the folder"
  for inside, folders, names in walk(folder):
    for name in (*folders, *names):
      path = Path(inside, name)
      if path.is_symlink():
        return path.relative_to(folder).as_posix()
  return None


def run_id(run: Path) -> str | None:
  """Id in the config.json of the run folder `run`; None without one.

  Raises:
    OSError: this process may not read it now.
  """
  try:
    return read_json(run / "config.json", _MAX_BYTES).get("run")
  except (OSError, ValueError) as error:
    _raise_without_access(error)
    return None


class _WrongDigests(ValueError):
  """The digests are readable but not those of this folder."""


def _read(folder: Path) -> dict[str, dict[str, Any]]:
  content = read_json(folder / FILE, _MAX_BYTES)
  written = content.pop("sha256")
  if written != digest_of(content):
    raise _WrongDigests(f"the content of {FILE} has changed")
  if content["folder"] != folder.name:
    raise _WrongDigests(f"its files belong to a folder called {content['folder']}")
  run = content.get("run")
  if run is not None and run_id(folder.absolute().parent.parent) not in (None, run):
    raise _WrongDigests("its files belong to another run")
  for name, entry in content["files"].items():
    place = PurePosixPath(name)
    if place.is_absolute() or ".." in place.parts or name != place.as_posix():
      raise _WrongDigests(f"{FILE} names {name!r}, which is not inside the folder")
    if type(entry["bytes"]) is not int or type(entry["sha256"]) is not str:
      raise _WrongDigests(f"{FILE} has no size and digest of {name}")
  return content["files"]


def _why_unreadable(error: Exception) -> str:
  if isinstance(error, FileNotFoundError):
    return f"it has no {FILE}"
  return str(error) if isinstance(error, _WrongDigests) else f"{FILE} cannot be read"


def _files(folder: Path) -> list[str]:
  found = []
  for inside, _, names in walk(folder):
    found += [Path(inside, name).relative_to(folder).as_posix() for name in names]
  return [name for name in found if name != FILE and not name.startswith(FILE + ".")]


def _size(path: Path) -> dict[str, Any]:
  return {"bytes": path.stat().st_size}


def _raise_without_access(error: Exception) -> None:
  if isinstance(error, OSError) and error.errno in NO_ACCESS:
    raise error


def _entry(path: Path, flush: bool = False) -> dict[str, Any]:
  with open_regular(path) as file:
    if flush:
      os.fsync(file.fileno())
    return {
      "bytes": os.fstat(file.fileno()).st_size,
      "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
    }
