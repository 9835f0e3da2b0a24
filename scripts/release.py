"""Checks a release and builds its files.

    python scripts/release.py check v0.1.0
    python scripts/release.py build --url https://HOST/OWNER/NAME

`check` compares the tag with the version of the package, of the changelog and of CITATION.cff.
`build` writes a source distribution, and the wheel that it builds, into dist/. The README of the
package index is ours with absolute links: a relative link becomes URL/blob/vVERSION/FILE, and the
metadata names URL as the repository. Without --url, as long as the repository has no public
address, relative links become plain text; such files are not for an index.
"""

import argparse
import datetime
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RELATIVE = re.compile(r"(!?)\[([^\]]+)\]\((?!https?://|#)([^)]+)\)")
# What git ignores at the top; hidden names are left out too.
LEFT_OUT = {"build", "data", "dist", "runs", "site"}


def version(root: Path = ROOT) -> str:
  """The version of the package, without importing it."""
  text = (root / "lnssm_jax" / "__init__.py").read_text()
  found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
  assert found, "lnssm_jax/__init__.py has no __version__"
  return found[1]


def problems(tag: str, root: Path = ROOT) -> list[str]:
  """Says what does not fit the release `tag`, such as v0.1.0; a line each."""
  number, found = version(root), []
  if tag != f"v{number}":
    found.append(f"the tag {tag} is not v{number}, the version in lnssm_jax/__init__.py.")
  citation = re.search(r"^version: (.+)$", (root / "CITATION.cff").read_text(), re.MULTILINE)
  if citation is None or citation[1] != number:
    found.append(f"CITATION.cff has the version {citation and citation[1]}, not {number}.")
  sections = dict(re.findall(
    r"^## \[([^\]]+)\](.*(?:\n(?!## ).*)*)", (root / "CHANGELOG.md").read_text(), re.MULTILINE
  ))  # fmt: skip
  if sections.get("Unreleased", "").strip():
    found.append(f"CHANGELOG.md has changes under Unreleased; move them to ## [{number}] - DATE.")
  if number not in sections:
    return [*found, f"CHANGELOG.md has no section ## [{number}] - DATE."]
  date, _, changes = sections[number].partition("\n")
  try:
    datetime.date.fromisoformat(date.removeprefix(" - "))
  except ValueError:
    found.append(
      f"CHANGELOG.md: ## [{number}]{date} needs a date, as in ## [{number}] - 2026-01-31."
    )
  if not changes.strip():
    found.append(f"CHANGELOG.md says nothing about {number}.")
  return found


def readme(text: str, url: str | None, tag: str) -> str:
  """The README for a package index, where relative links lead nowhere."""

  def absolute(link: re.Match) -> str:
    if url is None:
      return link[2]
    kind = "raw" if link[1] else "blob"
    return f"{link[1]}[{link[2]}]({url}/{kind}/{tag}/{link[3]})"

  return RELATIVE.sub(absolute, text)


def build(out: Path, url: str | None, root: Path = ROOT) -> list[Path]:
  """Writes the source distribution and its wheel into `out`; returns their paths."""
  out.mkdir(parents=True, exist_ok=True)
  tag = f"v{version(root)}"
  with tempfile.TemporaryDirectory() as folder:
    copy = Path(folder) / "copy"

    def left_out(place: str, names: list[str]) -> list[str]:
      top = Path(place) == root
      hidden = [name for name in names if name.startswith(".")]
      products = [name for name in names if name == "__pycache__" or name.endswith(".egg-info")]
      return hidden + products + (sorted(LEFT_OUT.intersection(names)) if top else [])

    shutil.copytree(root, copy, ignore=left_out)
    page = copy / "README.md"
    page.write_text(readme(page.read_text(), url, tag))
    if url is not None:
      project = copy / "pyproject.toml"
      links = {
        "Repository": url,
        "Changelog": f"{url}/blob/{tag}/CHANGELOG.md",
        "Documentation": f"{url}/tree/{tag}/docs",
        "Issues": f"{url}/issues",
      }
      table = "".join(f'{name} = "{link}"\n' for name, link in links.items())
      project.write_text(f"{project.read_text()}\n[project.urls]\n{table}")
    sdist = out / _call(copy, "build_sdist", out)
    with tarfile.open(sdist) as archive:
      archive.extractall(folder, filter="data")
    unpacked = Path(folder) / sdist.name.removesuffix(".tar.gz")
    return [sdist, out / _call(unpacked, "build_wheel", out)]


def _call(root: Path, hook: str, out: Path) -> str:
  """Name of the file that setuptools builds in `out`."""
  code = f"from setuptools import build_meta as b; print(b.{hook}({str(out.resolve())!r}))"
  done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
  if done.returncode:
    raise SystemExit(f"error: {hook} failed:\n{done.stderr}")
  return done.stdout.splitlines()[-1]


def main() -> int:
  """Runs one command; returns its exit code."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  commands = parser.add_subparsers(dest="command", required=True)
  checking = commands.add_parser("check", help="compare a tag with version and changelog")
  checking.add_argument("tag", help="such as v0.1.0")
  building = commands.add_parser("build", help="write dist/")
  building.add_argument("--url", help="public address of the repository")
  building.add_argument("--out", type=Path, default=ROOT / "dist")
  options = parser.parse_args()
  if options.command == "check":
    found = problems(options.tag)
    print("\n".join(found) or f"{options.tag} fits version, changelog and citation")
    return 1 if found else 0
  url = (options.url or "").rstrip("/") or None
  files = [str(path) for path in build(options.out, url)]
  print("\n".join(files), flush=True)
  if url is None:
    print("without --url: not for an index")
  if importlib.util.find_spec("twine") is None:
    print("not checked: `pip install twine`, then `twine check --strict dist/*`")
    return 0
  return subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files]).returncode


if __name__ == "__main__":
  sys.exit(main())
