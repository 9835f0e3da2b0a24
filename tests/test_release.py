"""The check of a release: tag, version, changelog and citation."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHANGELOG = """# Changelog

## [Unreleased]

## [1.2.0] - 2026-01-31
### Added
- a thing

## [1.1.0] - 2025-12-01
"""


def script(name):
  spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.fixture(scope="module")
def release():
  return script("release")


@pytest.fixture
def versions(monkeypatch):
  monkeypatch.syspath_prepend(ROOT / "scripts")
  return script("versions")


@pytest.fixture
def project(tmp_path):
  (tmp_path / "lnssm_jax").mkdir()
  (tmp_path / "lnssm_jax" / "__init__.py").write_text('__version__ = "1.2.0"\n')
  (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 1.2.0\n")
  (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
  return tmp_path


def test_release_that_fits(release, project):
  assert release.problems("v1.2.0", project) == []


@pytest.mark.parametrize(
  ("name", "old", "new", "problem"),
  [
    ("lnssm_jax/__init__.py", "1.2.0", "1.3.0", "the tag v1.2.0 is not v1.3.0"),
    ("CITATION.cff", "\nversion: 1.2.0", "\nversion: 1.1.0", "has the version 1.1.0, not 1.2.0"),
    ("CHANGELOG.md", "[1.2.0]", "[1.2.1]", "has no section ## [1.2.0] - DATE"),
    ("CHANGELOG.md", "2026-01-31", "soon", "## [1.2.0] - soon needs a date"),
    ("CHANGELOG.md", "### Added\n- a thing\n", "", "says nothing about 1.2.0"),
    ("CHANGELOG.md", "[Unreleased]\n", "[Unreleased]\n- more\n", "has changes under Unreleased"),
  ],
)
def test_release_that_does_not_fit_named(release, project, name, old, new, problem):
  path = project / name
  text = path.read_text()
  assert old in text
  path.write_text(text.replace(old, new))
  assert any(problem in line for line in release.problems("v1.2.0", project))


def test_links_of_the_readme_become_absolute_or_text(release):
  text = "[a](docs/a.md) [b](https://example.org/b) ![c](docs/c.png) [d](#part)"
  assert release.readme(text, "https://example.org/x", "v1.2.0") == (
    "[a](https://example.org/x/blob/v1.2.0/docs/a.md) [b](https://example.org/b)"
    " ![c](https://example.org/x/raw/v1.2.0/docs/c.png) [d](#part)"
  )
  assert release.readme(text, None, "v1.2.0") == "a [b](https://example.org/b) c [d](#part)"


def test_python_of_a_version_found_or_none(versions, monkeypatch):
  here = ".".join(map(str, sys.version_info[:2]))
  monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
  assert versions.interpreter(here)
  assert versions.interpreter("3.2") is None


def test_version_that_fails_is_reported(versions, monkeypatch, capsys):
  monkeypatch.setattr(sys, "argv", ["versions.py", "--python", "3.12", "3.2", "--jax", "1", "2"])
  monkeypatch.setattr(versions.release, "build", lambda *_: (None, Path("a.whl")))
  monkeypatch.setattr(versions, "interpreter", {"3.12": "python"}.get)
  monkeypatch.setattr(versions, "attempt", lambda python, jax, *_: (jax == "1", "said"))
  assert versions.main() == 1
  assert capsys.readouterr().out.splitlines() == [
    "works   Python 3.12, jax 1: said",
    "FAILED  Python 3.12, jax 2: said",
    "FAILED  Python 3.2, jax 1: this Python is not here",
    "FAILED  Python 3.2, jax 2: this Python is not here",
  ]


@pytest.mark.slow
def test_small_test_of_the_versions_passes_here(versions, tmp_path):
  environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
  command = [sys.executable, "-c", versions.SMOKE]
  done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert "\ntried 3." in done.stdout
