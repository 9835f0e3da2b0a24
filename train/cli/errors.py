"""Which errors are a user's: one line and an exit code. All others are bugs, with a traceback.

setting, data, file   `PrintableError`, or another ValueError of ours             2
path, disk            OSError that names a file, or of the disk; null in a path   2
device                an error while JAX starts its backend, as without a GPU     2
disk, descriptors     OSError that may be gone at the next start                  1
memory                MemoryError, and JAX's RESOURCE_EXHAUSTED                   1
run                   its own `exit_code`                                         1, 3
"""

import errno
import sys
import traceback
from pathlib import Path
from types import ModuleType

import lnssm_jax
import train
from lnssm_jax.files.printable import MAX_LINE, PrintableError, printable
from lnssm_jax.files.reading import TRANSIENT, is_transient
from train.messages import first_line

# Errors of writing that name no file, since the file was open.
_OF_DISKS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
_FIXES = {
  errno.ENOSPC: "free disk space, or use another folder",
  errno.EDQUOT: "free disk space, or use another folder",
  errno.EFBIG: "the disk, or `ulimit -f`, does not allow files of this size",
  errno.EROFS: "use a folder that can be written",
  errno.EACCES: "change its permissions, or use another path",
  errno.EPERM: "change its permissions, or use another path",
  errno.EISDIR: "name a file",
  errno.ENOTDIR: "a part of the path is a file; name a folder",
  errno.ELOOP: "links of the path lead in a circle; use another",
  errno.EMFILE: "raise `ulimit -n`",
  errno.ENFILE: "close other programs",
}
_NULL = "embedded null"  # in Python's ValueError for a path with a null character


def explained(error: Exception, package: ModuleType = train) -> tuple[int, str] | None:
  """Exit code and message for an error; None for a bug.

  The message has no control characters, and one line in most cases. Further lines are indented, so
  that none seems to be another message.

  Args:
    package: the program; its ValueErrors are a user's mistakes, as are those of `train` and
      `lnssm_jax`.
  """
  code = getattr(error, "exit_code", None)
  lines = error.args if isinstance(error, PrintableError) else [str(error)]
  if code is not None or isinstance(error, PrintableError):
    code = code or (1 if is_transient(error.__cause__) else 2)
  elif isinstance(error, OSError) and _is_of_a_file(error):
    code, lines = 1 if is_transient(error) else 2, [_of_file(error)]
  elif isinstance(error, ValueError) and str(error).startswith(_NULL):
    code, lines = 2, ["a path has a null character, as no path does; use another."]
  elif _is_out_of_memory(error):
    code, lines = 1, [f"out of memory ({first_line(error)}); use smaller sizes."]
  # A ValueError raised inside JAX or another library is a bug of ours, not a message for users.
  elif isinstance(error, ValueError | OSError) and _is_raised_by(error, package):
    code = 2
  elif reason := _without_device():
    code, lines = 2, [reason]
  else:
    return None
  first, *more = (printable(line, MAX_LINE) for line in lines)
  return code, "\n".join([first, *(x if x.startswith("  ") else f"  {x}" for x in more)])


def exit_code(error: Exception) -> int | None:
  """Exit code for an error: 2 for a user's mistake, 1 for a failed run, None for a bug."""
  found = explained(error)
  return found and found[0]


def _of_file(error: OSError) -> str:
  """The path, what is wrong with it, and a fix."""
  if error.errno == errno.ENAMETOOLONG:
    return f"{str(error.filename)[:80]!r}... is too long for a path; give a shorter one."
  names = [_path(name) for name in (error.filename, error.filename2) if name is not None]
  about, fix = " and ".join(map(str, names)), _FIXES.get(error.errno or 0)
  reason = (error.strerror or str(error)).rstrip(".")
  return f"{about}{': ' if about else ''}{reason}{f'; {fix}.' if fix else '.'}"


def _path(name: object) -> str:
  return name.decode(errors="surrogateescape") if isinstance(name, bytes) else str(name)


def _is_of_a_file(error: OSError) -> bool:
  return error.filename is not None or error.errno in _OF_DISKS | TRANSIENT


def _is_out_of_memory(error: Exception) -> bool:
  of_jax = type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error)[:80]
  return isinstance(error, MemoryError) or of_jax


def _without_device() -> str | None:
  """Says that JAX, if it was imported, finds no device, whatever error it raised for that."""
  jax = sys.modules.get("jax")
  try:
    if jax is not None:
      jax.devices()
  except Exception as error:
    return (
      f"JAX has no device to compute on ({first_line(error)}); install jax for this machine, or"
      " choose what it has by JAX_PLATFORMS, such as JAX_PLATFORMS=cpu."
    )
  return None


def _is_raised_by(error: Exception, package: ModuleType) -> bool:
  place = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
  packages = (Path(module.__file__ or "").parent for module in (package, train, lnssm_jax))
  return any(place.is_relative_to(package) for package in packages)
