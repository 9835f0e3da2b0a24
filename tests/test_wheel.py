"""The wheel: library and training stack, nothing else, typed, usable without a checkout."""

import configparser
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import lnssm_jax

ROOT = Path(__file__).parents[1]
PACKAGES = ("lnssm_jax", "pallas_kernels", "train")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
  """A wheel built from a copy, so that nothing is left behind in the checkout."""
  folder = tmp_path_factory.mktemp("wheel")
  copy = folder / "source"
  copy.mkdir()
  for name in (*PACKAGES, "configs", "tests", "docs", "benchmarks"):
    if (ROOT / name).is_dir():
      shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
  for name in ("pyproject.toml", "README.md", "LICENSE"):
    shutil.copy(ROOT / name, copy / name)
  code = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
  done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  (path,) = folder.glob("*.whl")
  return path


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
  archive = zipfile.ZipFile(wheel)
  (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
  metadata = Parser().parsestr(archive.read(name).decode())
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
    f" {function}(['init', 'mine.py']); sys.exit({function}(['--version']))"
  )
  done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert done.stdout == f"mine.py\nlnssm_jax {lnssm_jax.__version__}\n"


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
