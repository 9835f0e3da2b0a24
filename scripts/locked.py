"""Prints the locked requirements of some extras of the project, with their hashes.

    python scripts/locked.py train,dev > requirements.txt
    pip install --require-hashes -r requirements.txt

`constraints.txt` locks all extras but `rouge` and `lm-eval`, which no environment here has, and
`cuda13`, whose additional packages are in `constraints-cuda13.txt`. Which packages an extra needs
follows from the comments `# via PACKAGE` of these files. The tools that build the project (the
group `build`) are always included.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CUDA = "cuda13"


def select(extras: list[str], root: Path = ROOT) -> str:
  """Lines of the lock files for `extras`, sorted by package.

  Raises:
    LookupError: an extra does not exist, or a package that one names is not locked.
  """
  pyproject = tomllib.loads((root / "pyproject.toml").read_text())
  declared = pyproject["project"]["optional-dependencies"]
  if unknown := sorted(set(extras) - declared.keys()):
    raise LookupError(f"extra {unknown[0]!r} is none of {', '.join(declared)}; see pyproject.toml.")
  entries = read(root / "constraints.txt")
  named = [*pyproject["project"]["dependencies"], *pyproject["dependency-groups"]["build"]]
  for extra in extras:
    named += declared[extra] if extra != CUDA else []
  waiting = [_name(requirement) for requirement in named]
  selected = {}
  while waiting:
    name = waiting.pop()
    if name not in entries:
      raise LookupError(f"{name} is not in constraints.txt; run `make constraints`.")
    if name not in selected:
      selected[name] = entries[name][0]
      waiting += [child for child, (_, parents) in entries.items() if name in parents]
  if CUDA in extras:
    selected |= {name: text for name, (text, _) in read(root / f"constraints-{CUDA}.txt").items()}
  return "".join(selected[name] for name in sorted(selected))


def read(path: Path) -> dict[str, tuple[str, set[str]]]:
  """{package: (its lines without comments, the packages that need it)} of a lock file."""
  entries = {}
  for block in re.split(r"^(?=[A-Za-z0-9])", path.read_text(), flags=re.MULTILINE)[1:]:
    kept = [line for line in block.splitlines(keepends=True) if not line.lstrip().startswith("#")]
    parents = set(re.findall(r"^ +# +(?:via )?([\w.-]+)$", block, re.MULTILINE))
    entries[_name(block)] = "".join(kept), parents
  return entries


def _name(requirement: str) -> str:
  return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement, maxsplit=1)[0]).lower()


if __name__ == "__main__":
  print(select(sys.argv[1].split(",")), end="")
