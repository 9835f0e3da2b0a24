"""Folders in buckets, gs:// and s3://, each with a whole copy on this machine.

What reads or writes files works on the copy, `local(path)`. Objects appear whole but one by one,
and there is no rename. So the file that makes the others valid is written last and removed first:
the digests of a checkpoint, the manifest of an exported model, the sidecar of token files.
"""

import contextlib
import errno
import posixpath
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lnssm_jax.files import user_cache
from lnssm_jax.files.printable import PrintableError, printable
from lnssm_jax.files.reading import TRANSIENT

PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}  # of fsspec, by scheme
# Of an exported or a published model: those that say what the other files are.
_LAST = ("manifest.json", "adapter_config.json", "config.json")
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)")
_THREADS = 8
_ATTEMPTS = 3
_OF_NETWORKS = {*TRANSIENT, errno.EREMOTEIO, errno.ENETUNREACH, errno.EHOSTUNREACH}
_OF_SETTINGS = ("Credentials", "Profile", "Validation")  # in the names of errors of the packages


class BucketError(PrintableError, ValueError):
  """A bucket cannot be reached, read or written; the message says which and why.

  Attributes:
    exit_code: of the command line: 1 if a network or a server failed, which may be back later.
  """

  exit_code = 2


def is_address(path: object) -> bool:
  """Whether a path is that of a bucket or server, "gs://bucket/x", and not of a local file.

  pathlib makes it a local folder "gs:/bucket", into which a run would write all day.
  """
  return _ADDRESS.match(str(path)) is not None


def no_address(name: str, path: object, in_bucket: bool = False) -> str:
  """Message about an address where a local path, or one in a bucket, is needed."""
  kinds = "gs://, s3:// and local paths" if in_bucket else "local paths"
  path = _ADDRESS.sub(r"\1://\2", str(path), 1)  # of which a Path has one slash
  return (
    f"{name}={path!r:.200} is the address of a bucket or server; only {kinds} are"
    " supported: use one, and copy it there afterwards."
  )


def is_bucket(path: object) -> bool:
  """Whether a path is an address of a bucket of a supported kind."""
  found = _ADDRESS.match(str(path))
  return found is not None and found[1] in PACKAGES


def local(path: str | Path) -> Path:
  """The local copy of a folder in a bucket, which may not exist; of a local path, the path.

  It is `$XDG_CACHE_HOME/lnssm_jax/buckets/gs/BUCKET/...`, by default in `~/.cache`.

  Raises:
    BucketError: the address is of another kind, or has no bucket.
  """
  found = _ADDRESS.match(str(path))
  if found is None:
    return Path(path)
  scheme, rest = found[1], found[2].rstrip("/")
  if scheme not in PACKAGES or not rest or posixpath.normpath(rest) != rest or rest[0] == ".":
    raise BucketError(
      f"{printable(path, 200)} is no folder of a bucket; use gs://BUCKET/FOLDER or"
      " s3://BUCKET/FOLDER."
    )
  return user_cache.folder() / "buckets" / scheme / rest


class Bucket:
  """The files of a folder in a bucket, by their paths relative to it.

  Raises:
    BucketError: the package for its kind is missing, and from every method: it cannot be reached.
  """

  def __init__(self, address: str | Path):
    local(address)  # checks it
    scheme, self._root = _ADDRESS.match(str(address)).groups()  # pyrefly: ignore
    self._root = self._root.rstrip("/")
    self.address = f"{scheme}://{self._root}"
    with self._reached():  # credentials may be read here
      try:
        import fsspec

        self._fs: Any = fsspec.filesystem(scheme, use_listings_cache=False)
      except ImportError:
        package = PACKAGES[scheme]
        raise BucketError(
          f"{self.address} needs the package {package}: pip install {package}"
        ) from None

  def files(self, under: str = "") -> dict[str, int]:
    """Sizes in bytes of all files in a folder, {} if there is none."""
    with self._reached(), contextlib.suppress(FileNotFoundError):
      root = self._path(under) if under else self._root
      found = self._fs.find(root, detail=True)
      names = {path.lstrip("/").removeprefix(f"{self._root}/"): x for path, x in found.items()}
      # Consoles stand for a folder by an empty object, "folder/".
      names = {name: x for name, x in names.items() if name and not name.endswith("/")}
      for name in names:  # of whoever may write there
        if name != posixpath.normpath(name) or name.startswith(("/", "..")):
          raise BucketError(f"{self.address} has a file {name!r:.200}, outside of it; remove it.")
      return {name: x["size"] for name, x in names.items()}
    return {}

  def read(self, name: str) -> bytes | None:
    """The content of a small file; None if it does not exist."""
    with self._reached(), contextlib.suppress(FileNotFoundError):
      return self._fs.cat_file(self._path(name))
    return None

  def write(self, name: str, content: bytes) -> None:
    """Writes a small file, whole or not at all."""
    with self._reached():
      self._fs.pipe_file(self._path(name), content)

  def upload(self, folder: Path, names: Iterable[str], last: Iterable[str] = ()) -> None:
    """Writes files of a local folder; those of `last` once all others are there."""
    put = lambda name: self._fs.put_file(str(folder / name), self._path(name))
    self._for_each(names, put, last)

  def download(self, folder: Path, names: Iterable[str], last: Iterable[str] = ()) -> None:
    """Copies files into a local folder, each atomically, and those of `last` last."""

    def get(name: str) -> None:
      path = folder / name
      path.parent.mkdir(parents=True, exist_ok=True)
      partial = path.with_name(f".{secrets.token_hex(8)}")
      try:
        size = -1
        for _ in range(_ATTEMPTS):  # it may be written meanwhile
          size = self._fs.info(self._path(name))["size"]
          self._fs.get_file(self._path(name), str(partial))
          if partial.stat().st_size == size:
            break
        else:
          raise TimeoutError(f"{name} arrived with {partial.stat().st_size} of {size} bytes")
        partial.replace(path)
      finally:
        partial.unlink(missing_ok=True)

    self._for_each(names, get, last)

  def remove(self, names: Iterable[str], first: Iterable[str] = ()) -> None:
    """Removes files, those of `first` before the others."""
    names, first = [*names], {*first}
    others = [name for name in names if name not in first]
    self._for_each(names, lambda name: self._fs.rm_file(self._path(name)), others)

  def _path(self, name: str) -> str:
    return f"{self._root}/{name}"

  def _for_each(
    self, names: Iterable[str], function: Callable[[str], Any], last: Iterable[str] = ()
  ) -> None:
    last = [*last]
    with self._reached(), ThreadPoolExecutor(_THREADS) as pool:
      for group in ([name for name in names if name not in last], last):
        list(pool.map(function, group))

  @contextlib.contextmanager
  def _reached(self) -> Iterator[None]:
    try:
      yield
    except BucketError:
      raise
    except Exception as error:  # of many kinds, in the packages
      why = " ".join(f"{type(error).__name__}: {error}".split())[:500]
      failed = BucketError(f"{self.address} cannot be used ({why})")
      failed.exit_code = 1 if _may_be_gone_later(error) else 2
      raise failed from error


def _may_be_gone_later(error: Exception) -> bool:
  """Whether a network or a server failed, and not an address, a permission or a local disk."""
  status = getattr(error, "code", None)  # of HTTP, in gcsfs
  if isinstance(answer := getattr(error.__cause__, "response", None), dict):  # in s3fs
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
  if isinstance(status, int):
    return status in (408, 429) or status >= 500
  if isinstance(error, ConnectionError | TimeoutError):
    return True
  if isinstance(error, OSError) and error.errno is not None:
    return error.errno in _OF_NETWORKS or error.errno < 0  # of the name of a host
  kind = type(error)
  if kind.__module__.partition(".")[0] in ("aiohttp", "requests", "urllib3"):
    return True
  is_of_settings = any(name in kind.__name__ for name in _OF_SETTINGS)
  return not isinstance(error, OSError | ValueError | TypeError) and not is_of_settings


def fetched(path: str | Path) -> Path:
  """`local(path)` of an exported or a published model, brought up to date.

  Raises:
    BucketError: it cannot be read, or there is nothing.
  """
  folder = local(path)
  if not is_bucket(path):
    return folder
  bucket = Bucket(path)
  files = bucket.files()
  if not files:
    raise BucketError(f"there is nothing in {bucket.address}.")
  is_here = lambda name: (folder / name).is_file() and (folder / name).stat().st_size == files[name]
  last = [name for name in _LAST if name in files]
  same = last and all(is_here(x) and bucket.read(x) == (folder / x).read_bytes() for x in last)
  wanted = [name for name in files if not (same and is_here(name))]
  bucket.download(folder, wanted, [name for name in last if name in wanted])
  return folder


def publish(folder: Path, address: str | Path) -> None:
  """Uploads a new folder, its manifest or config last; removes all of it if that fails."""
  names = [x.relative_to(folder).as_posix() for x in folder.rglob("*") if x.is_file()]
  bucket, last = Bucket(address), [name for name in _LAST if name in names]
  try:
    bucket.upload(folder, names, last)
  except BaseException:
    with contextlib.suppress(Exception):
      bucket.remove(bucket.files(), first=last)
    raise
