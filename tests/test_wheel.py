"""The files of a release: a source distribution with its tests, and a wheel without them."""

import configparser
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import lnssm_jax

ROOT = Path(__file__).parents[1]
URL = "https://example.org/someone/lnssm_jax"
PACKAGES = ("lnssm_jax", "pallas_kernels", "train")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
  """The source distribution and the wheel that it builds, from a copy of the checkout."""
  folder = tmp_path_factory.mktemp("dist")
  command = [sys.executable, ROOT / "scripts" / "release.py", "build", "--out", folder]
  done = subprocess.run([*command, "--url", URL], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
  return sdist, wheel


@pytest.fixture(scope="module")
def wheel(built) -> Path:
  return built[1]


@pytest.fixture
def unpacked(built, tmp_path) -> Path:
  with tarfile.open(built[0]) as archive:
    archive.extractall(tmp_path, filter="data")
  (folder,) = tmp_path.iterdir()
  return folder


def metadata_of(wheel: Path):
  archive = zipfile.ZipFile(wheel)
  (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
  return Parser().parsestr(archive.read(name).decode())


@pytest.mark.slow
def test_sdist_holds_what_is_tracked(unpacked):
  if not (ROOT / ".git").exists():
    pytest.skip("not a checkout")
  command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
  listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
  names = (name for name in listed.stdout.splitlines() if (ROOT / name).is_file())
  tracked = {name for name in names if not name.startswith(".")}
  found = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
  made = {name for name in found if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
  assert found - made == tracked


@pytest.mark.slow
def test_sdist_passes_tests_of_its_own(unpacked):
  """Some of every kind: structure, words, ops, mixers, data, training, scripts."""
  chosen = [
    "tests/test_structure.py",
    "tests/test_prose.py",
    "tests/test_mutations.py",
    "tests/test_slow_list.py",
    "tests/ops/test_log_decay.py",
    "tests/mixers/test_lnssm.py",
    "tests/data/test_tokenize.py",
    "tests/train/test_preflight.py",
  ]
  environment = os.environ | {"PYTHONPATH": str(unpacked), "JAX_PLATFORMS": "cpu"}
  done = subprocess.run(
    [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *chosen],
    cwd=unpacked,
    env=environment,
    capture_output=True,
    text=True,
    timeout=1200,
  )
  assert done.returncode == 0, done.stdout[-3000:]


def test_metadata_has_absolute_links_only(wheel):
  metadata = metadata_of(wheel)
  assert metadata["Author"] == "lnssm_jax contributors"
  links = dict(entry.split(", ") for entry in metadata.get_all("Project-URL"))
  assert links["Repository"] == URL and links["Changelog"].endswith("/CHANGELOG.md")
  text = metadata.get_payload()
  assert f"]({URL}/blob/v{lnssm_jax.__version__}/docs/training.md)" in text
  assert re.findall(r"\]\((?!https://)", text) == []


def test_wheel_holds_its_packages_and_nothing_else(wheel):
  names = zipfile.ZipFile(wheel).namelist()
  files = {name for name in names if ".dist-info/" not in name}
  expected = {
    str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")
  }
  assert {name for name in files if name.endswith(".py")} == expected
  typed = {"lnssm_jax/py.typed", "lnssm_jax/linen.pyi", "pallas_kernels/py.typed"}
  launchers = {str(path.relative_to(ROOT)) for path in (ROOT / "train/launch").iterdir()}
  assert {name for name in files if not name.endswith(".py")} == typed | launchers
  assert {name.split("/")[0] for name in files} <= set(PACKAGES)
  assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_wheel_requires_jax_and_flax_only(wheel):
  metadata = metadata_of(wheel)
  required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
  assert sorted(required) == ["flax>=0.12.10", "jax<0.13,>=0.11.2"]
  assert metadata["Requires-Python"] == ">=3.12"
  assert metadata["License-Expression"] == "Apache-2.0"
  assert "Typing :: Typed" in metadata.get_all("Classifier", [])
  assert {"train", "cuda13", "dev", "docs"} <= set(metadata.get_all("Provides-Extra", []))


def test_wheel_has_the_command_of_the_training_stack(wheel, tmp_path):
  archive = zipfile.ZipFile(wheel)
  (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/entry_points.txt"))
  entries = configparser.ConfigParser()
  entries.read_string(archive.read(name).decode())
  module, function = entries["console_scripts"]["lnssm-train"].split(":")
  archive.extractall(tmp_path / "site")
  code = (
    f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); from {module} import {function};"
    f" {function}()"
  )
  version = f"lnssm_jax {lnssm_jax.__version__}\n"
  for arguments, out in ((["init", "mine.py"], "mine.py\n"), (["--version"], version)):
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == out


def test_wheel_imports_outside_the_checkout(wheel, tmp_path):
  site = tmp_path / "site"
  zipfile.ZipFile(wheel).extractall(site)
  code = (
    f"import sys; sys.path.insert(0, {str(site)!r}); import lnssm_jax, lnssm_jax.models as m;"
    " print(lnssm_jax.__file__, m.__file__)"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
  )
  assert done.returncode == 0, done.stderr
  assert all(path.startswith(str(site)) for path in done.stdout.split())
