"""Plants small faults in copies of the project and reports which of them the default tests see.

    python scripts/mutations.py                      # every fault: its own tests, then the suite
    python scripts/mutations.py --first              # every fault: its own tests only
    python scripts/mutations.py --only boundary loss --jobs 2
    python scripts/mutations.py --list
    python scripts/mutations.py --check              # every fault still applies

`scripts/faults/` lists the faults, in a file per part of the project. A [[fault]] replaces `old`,
which must occur exactly once in the sources (white space counts as equal; `within` narrows the
search to paths that contain it), by `new`; when code moves, these need a new look. `tests` are
pytest arguments: the tests of the default suite that can see the fault. They run first; if they
pass, the default suite runs, and stops at its first failure. A fault is caught when a test fails. A
program that cannot be imported or a test that does not exist counts as neither.
"""

import argparse
import concurrent.futures
import contextlib
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "scripts" / "faults"
SOURCES = (
  "lnssm_jax",
  "pallas_kernels",
  "train",
  "experiments",
  "configs",
  "scripts",
  "benchmarks",
  "tests/reliability",
)
SUFFIXES = (".py", ".sh", ".yaml")
PYTEST = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow")


class Fault(NamedTuple):
  """One planted fault."""

  name: str
  old: str
  new: str
  tests: list[str]  # pytest arguments, one run each
  within: str = ""

  def find(self, sources: dict[Path, str]) -> tuple[Path, re.Match]:
    """The file and the place of `old`.

    Raises:
      LookupError: it occurs nowhere, or more than once.
    """
    words = self.old.split()
    pattern = r"\s+".join(map(re.escape, words))
    words.sort(key=len, reverse=True)  # few files have the longest
    found = [
      (path, match)
      for path, text in sources.items()
      if all(word in text for word in words) and self.within in path.as_posix()
      for match in re.finditer(pattern, text)
    ]
    if len(found) != 1:
      places = ", ".join(sorted({str(path) for path, _ in found})) or "nowhere"
      raise LookupError(f"{self.name}: {self.old!r} occurs {len(found)} times: {places}")
    return found[0]

  def patched(self, sources: dict[Path, str]) -> tuple[Path, str]:
    """The file and its text with the fault in it."""
    path, match = self.find(sources)
    text = match.string
    return path, text[: match.start()] + self.new.strip() + text[match.end() :]


class Outcome(NamedTuple):
  fault: Fault
  status: str  # "caught", "ESCAPED" or "BROKEN"
  where: str
  seconds: float


def read_faults() -> list[Fault]:
  """Those of all files, in their order."""
  files = [tomllib.loads(path.read_text()) for path in sorted(FAULTS.glob("*.toml"))]
  return [Fault(**entry) for file in files for entry in file["fault"]]


def read_sources(root: Path = ROOT) -> dict[Path, str]:
  """The text of every source file, by its path below `root`."""
  return {
    path.relative_to(root): path.read_text()
    for folder in SOURCES
    for path in sorted((root / folder).rglob("*"))
    if path.suffix in SUFFIXES
  }


def try_fault(fault: Fault, first_only: bool, copies: queue.SimpleQueue[Path]) -> Outcome:
  """Runs the tests on one of the copies, with the fault in it."""
  begin = time.monotonic()
  with faulty_copy(fault, copies) as folder:
    status, where = run_tests(fault, first_only, folder)
  return Outcome(fault, status, where, time.monotonic() - begin)


def run_tests(fault: Fault, first_only: bool, folder: Path) -> tuple[str, str]:
  """Status and the failed test, or why there is none."""
  for arguments in [*fault.tests, *([] if first_only else [""])]:
    code, output = pytest(arguments, folder)
    if code == 1:
      failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
      return "caught", failed[0] if failed else arguments
    if code != 0:
      return "BROKEN", f"pytest {arguments} ends with {code}: {output[-600:]}"
  return "ESCAPED", ""


@contextlib.contextmanager
def faulty_copy(fault: Fault, copies: queue.SimpleQueue[Path]) -> Iterator[Path]:
  """A copy that has the fault until the context ends."""
  folder = copies.get()
  try:
    path, text = fault.patched(read_sources(folder))
    (folder / path).write_text(text)
    try:
      yield folder
    finally:
      shutil.copy2(ROOT / path, folder / path)
  finally:
    copies.put(folder)


def pytest(arguments: str, folder: Path) -> tuple[int, str]:
  """Exit status and output."""
  environment = os.environ | {"PYTHONPATH": str(folder), "OPENBLAS_NUM_THREADS": "1"}
  command = [*PYTEST, *shlex.split(arguments)]
  run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
  return run.returncode, run.stdout + run.stderr


def copy_tracked(target: Path) -> None:
  """Copies the files that git tracks, as they are in the working tree."""
  listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
  for name in filter(None, listed.stdout.decode().split("\0")):
    if (ROOT / name).is_file():
      (target / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy2(ROOT / name, target / name)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--only", nargs="+", default=[""], help="faults whose names contain these")
  parser.add_argument("--first", action="store_true", help="only each fault's own tests")
  parser.add_argument("--jobs", type=int, default=1, help="faults tried at a time")
  parser.add_argument("--list", action="store_true", help="print the faults' names")
  parser.add_argument("--check", action="store_true", help="only whether every fault applies")
  args = parser.parse_args()
  faults = [f for f in read_faults() if any(part in f.name for part in args.only)]
  if args.list:
    print(*(fault.name for fault in faults), sep="\n")
    return 0
  if args.check:
    wrong, sources = [], read_sources()
    for fault in faults:
      try:
        fault.find(sources)
      except LookupError as error:
        wrong.append(str(error))
    print(*wrong, f"{len(faults) - len(wrong)} of {len(faults)} faults apply", sep="\n")
    return bool(wrong)
  outcomes = []
  with (
    tempfile.TemporaryDirectory() as folder,
    concurrent.futures.ThreadPoolExecutor(args.jobs) as pool,
  ):
    # One copy per job, for all of its faults: bytecode and compiled programs are made once.
    copies = queue.SimpleQueue[Path]()
    for job in range(args.jobs):
      copy_tracked(Path(folder, str(job)))
      copies.put(Path(folder, str(job)))
    futures = [pool.submit(try_fault, fault, args.first, copies) for fault in faults]
    for future in concurrent.futures.as_completed(futures):
      outcomes.append(outcome := future.result())
      name = outcome.fault.name
      print(f"{outcome.status:8} {outcome.seconds:5.0f} s  {name:44} {outcome.where}", flush=True)
  caught = sum(outcome.status == "caught" for outcome in outcomes)
  print(f"{caught} of {len(outcomes)} caught")
  return caught != len(outcomes)


if __name__ == "__main__":
  sys.exit(main())
