"""The documentation site: the API reference is complete, and the pages build without warnings."""

import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lnssm_jax import ops

ROOT = Path(__file__).parents[1]


def test_reference_of_ops_is_complete():
  page = (ROOT / "docs" / "api" / "ops.md").read_text()
  sections = re.findall(r"^::: lnssm_jax\.ops\.(\w+)\.api\.(\w+)$", page, re.MULTILINE)
  public = {name for name in ops.__all__ if getattr(ops, name).__module__.endswith(".api")}
  assert {function for _, function in sections} == public
  assert all((ROOT / "lnssm_jax" / "ops" / folder / "api.py").is_file() for folder, _ in sections)


PACKAGES = (
  *("lnssm_jax.ops", "lnssm_jax.mixers", "lnssm_jax.models", "lnssm_jax.analysis"),
  *("lnssm_jax.frameworks", "lnssm_jax.pretrained"),
  *("train", "train.config", "train.data", "train.sweeps"),
)


def test_public_names_are_those_of_the_reference():
  """Each name in `__all__` of a package is on a page, and each name on a page exists."""
  pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
  shown = re.findall(r"^::: (\S+)\n((?:    .*\n)*)", pages, re.MULTILINE)
  members = {
    place: found[1].split(", ") if (found := re.search(r"members: \[(.*)\]", options)) else None
    for place, options in shown
  }
  named = {name for names in members.values() for name in names or ()}
  named |= {place.rpartition(".")[2] for place in members}
  for package in PACKAGES:
    module = importlib.import_module(package)
    for name in module.__all__:
      value = getattr(module, name)
      home, name = getattr(value, "__module__", ""), getattr(value, "__name__", name)
      is_whole = package in members or members.get(home, ()) is None
      assert is_whole or name in named or inspect.ismodule(value), (package, name)
  for place, names in members.items():
    for name in names or ():
      assert hasattr(importlib.import_module(place), name), f"{place} has no {name}"


def test_links_between_files_of_the_project_exist():
  folders = ("docs", "experiments", "lnssm_jax", "pallas_kernels")
  pages = [*ROOT.glob("*.md"), *(page for name in folders for page in (ROOT / name).rglob("*.md"))]
  missing = []
  for page in pages:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    # Pages of notebooks are made with the site.
    files = [link for link in links if "://" not in link and not link.startswith("notebooks/")]
    missing += [f"{page.name}: {file}" for file in files if not (page.parent / file).exists()]
  assert missing == []


def test_first_page_begins_as_the_readme_does():
  """Its sentence, numbers, installation and example are those of the README; it has a picture."""
  spec = importlib.util.spec_from_file_location("pages", ROOT / "scripts" / "notebook_pages.py")
  hook = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(hook)
  page = hook.with_readme((ROOT / "docs" / "index.md").read_text())
  readme = (ROOT / "README.md").read_text()
  for part in ("token mixers", "tokens/s (H200)", "pip install .", "rows = generate(model"):
    (line,) = (line for line in readme.splitlines() if part in line and "](" not in line)
    assert line in page
  links = re.findall(r"\]\(([^)#]+)", page)
  missing = {link for link in links if not (ROOT / "docs" / link).exists()}
  assert "kernels.png" in links and "performance.md" in links
  assert all(link.startswith("notebooks/") for link in missing)


@pytest.mark.slow
def test_pages_build_without_warnings(tmp_path):
  pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
  command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
  environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
  done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert "linear_attention" in (tmp_path / "api" / "ops" / "index.html").read_text()
