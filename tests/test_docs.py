"""The documentation site: the API reference is complete, and the pages build without warnings."""

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


@pytest.mark.slow
def test_pages_build_without_warnings(tmp_path):
  pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
  command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
  environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
  done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert "linear_attention" in (tmp_path / "api" / "ops" / "index.html").read_text()
