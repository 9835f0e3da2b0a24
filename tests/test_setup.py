"""`make` on a machine without a fitting Python, with a broken environment, or with none."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ("sh", "make", "rm", "cat", "head", "touch", "tr", "grep", "env")


@pytest.fixture
def project(tmp_path) -> Path:
  """The files that set-up reads, with a `bin` that holds no Python."""
  for name in ("Makefile", "pyproject.toml", "constraints.txt"):
    shutil.copy(ROOT / name, tmp_path / name)
  shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
  (tmp_path / "bin").mkdir()
  for tool in TOOLS:
    found = shutil.which(tool)
    assert found
    (tmp_path / "bin" / tool).symlink_to(found)
  return tmp_path


def program(path: Path, script: str) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(f"#!/bin/sh\n{script}\n")
  path.chmod(path.stat().st_mode | stat.S_IXUSR)


def fake_python(path: Path, *, log: Path, version=(3, 12)) -> None:
  """An interpreter that says `version`, notes its modules' calls in `log`, and installs nothing."""
  program(
    path,
    f"""
case "$*" in
  *"sys.version_info < ("*) [ "{version[0] * 100 + version[1]}" -ge 312 ] ;;
  *sys.executable*) echo "{path}" ;;
  *platform*) echo "Python {version[0]}.{version[1]}.0" ;;
  "-m venv "*)
    echo "$*" >>"{log}"
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python" ;;
  "-m pip --version") ;;
  -m*) echo "$*" >>"{log}" ;;
esac""",
  )


def make(project: Path, *arguments: str) -> subprocess.CompletedProcess:
  environment = {"PATH": f"{project / 'bin'}", "HOME": str(project)}
  return subprocess.run(
    [str(project / "bin" / "make"), *arguments],
    cwd=project,
    env=environment,
    capture_output=True,
    text=True,
    timeout=60,
  )


def with_copying_tools(project: Path) -> Path:
  for tool in ("mkdir", "cp"):
    found = shutil.which(tool)
    assert found
    (project / "bin" / tool).symlink_to(found)
  return project / "calls.log"


def test_missing_python_is_an_error_with_the_fix(project):
  done = make(project, "train")
  assert done.returncode != 0
  assert "error: no Python 3.12 or newer was found" in done.stderr
  assert "make PYTHON=/path/to/python3.12" in done.stderr
  assert not (project / ".venv").exists()


def test_broken_shim_of_python_is_skipped(project):
  log = with_copying_tools(project)
  program(project / "bin" / "python3.12", "echo 'not installed' >&2; exit 127")
  fake_python(project / "bin" / "python3.13", log=log, version=(3, 11))
  fake_python(project / "bin" / "python3", log=log, version=(3, 14))
  done = make(project, "train")
  assert done.returncode == 0, done.stderr
  assert "Python 3.14.0" in done.stdout
  assert log.read_text().splitlines()[0] == "-m venv .venv"


def test_old_python_as_asked_for_is_rejected(project):
  fake_python(project / "bin" / "old", log=project / "log", version=(3, 11))
  done = make(project, "train", "PYTHON=old")
  assert done.returncode != 0
  assert "PYTHON=old is not a Python 3.12 or newer (Python 3.11.0)" in done.stderr


def test_dev_extra_is_installed_for_tests_only(project):
  log = with_copying_tools(project)
  fake_python(project / "bin" / "python3", log=log)
  assert make(project, "train").returncode == 0
  assert "--constraint constraints.txt --editable .[train]" in log.read_text()
  assert "dev" not in log.read_text()
  assert make(project, "test").returncode == 0
  assert "--editable .[train,dev]" in log.read_text()


def test_docs_are_built_strictly_with_their_own_extra(project):
  log = with_copying_tools(project)
  fake_python(project / "bin" / "python3", log=log)
  assert make(project, "docs").returncode == 0
  assert "--editable .[train,dev,notebooks,docs]" in log.read_text()
  assert log.read_text().splitlines()[-1] == "-m mkdocs build --strict"


def test_second_call_installs_nothing(project):
  log = with_copying_tools(project)
  fake_python(project / "bin" / "python3", log=log)
  make(project, "train")
  log.write_text("")
  assert make(project, "train", "ARGS=--set steps=3").returncode == 0
  assert log.read_text() == "-m train fit --config configs/quickstart.py --set steps=3\n"


@pytest.mark.parametrize("damage", ["python gone", "stopped halfway", "pins changed"])
def test_damaged_environment_is_repaired(project, damage):
  log = with_copying_tools(project)
  fake_python(project / "bin" / "python3", log=log)
  make(project, "train")
  if damage == "python gone":
    (project / ".venv/bin/python").unlink()
    (project / ".venv/bin/python").symlink_to("/does/not/exist")
  elif damage == "stopped halfway":
    (project / ".venv/.ready-train").unlink()
  else:
    later = (project / ".venv/.ready-train").stat().st_mtime + 10
    os.utime(project / "constraints.txt", (later, later))
  log.write_text("")
  assert make(project, "train").returncode == 0
  calls = log.read_text()
  assert "-m pip install" in calls
  assert ("-m venv .venv" in calls) == (damage == "python gone")


def test_folder_that_is_no_environment_is_kept(project):
  log = with_copying_tools(project)
  fake_python(project / "bin" / "python3", log=log)
  (project / "mine").mkdir()
  (project / "mine" / "file").write_text("kept")
  done = make(project, "train", "VENV=mine")
  assert done.returncode != 0
  assert "mine exists and is not a virtual environment" in done.stderr
  assert (project / "mine" / "file").read_text() == "kept"


def test_gpu_with_a_new_driver_gets_the_gpu_build(project):
  log = with_copying_tools(project)
  fake_python(project / "bin" / "python3", log=log)
  program(project / "bin" / "nvidia-smi", "echo 580.65.06; echo 580.65.06")
  assert make(project, "train").returncode == 0
  assert "--editable .[train,cuda13]" in log.read_text()
  program(project / "bin" / "nvidia-smi", "echo 550.54.15")
  done = make(project, "train", "VENV=.venv-old-driver")
  assert "driver 550.54.15 is older than 580" in done.stdout
  assert log.read_text().splitlines()[-2].endswith(".[train]")


def test_empty_venv_makes_no_environment(project):
  done = make(project, "train", "VENV=", f"PYTHON={sys.executable}", "--dry-run")
  assert done.stdout == f"{sys.executable} -m train fit --config configs/quickstart.py \n"


def test_another_jax_gets_its_own_environment(project):
  log = with_copying_tools(project)
  fake_python(project / "bin" / "python3", log=log)
  assert make(project, "test", "JAX=0.12.0.1").returncode == 0
  pins = (project / ".venv-jax-0.12.0.1/constraints.txt").read_text().splitlines()
  assert "jax==0.12.0.1" in pins
  assert not any(line.startswith("jaxlib==") or line == "jax==0.11.2" for line in pins)
