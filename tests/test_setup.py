"""`make` on a machine without a fitting Python, with a broken environment, or none; lock files."""

import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
TOOLS = ("sh", "make", "rm", "cat", "head", "touch", "tr", "grep", "env", "cksum")


@pytest.fixture
def project(tmp_path) -> Path:
  """The files that set-up reads, with a `bin` that holds no Python."""
  for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints-cuda13.txt"):
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
  scripts/*) echo "$*" >>"{log}" ;;
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
  assert [
    line.split("--disable-pip-version-check ")[-1] for line in log.read_text().splitlines()
  ] == [
    "-m venv .venv",
    "scripts/locked.py train",
    "--require-hashes --requirement .venv/requirements.txt",
    "--no-deps --no-build-isolation --editable .",
    "-m compileall -q -j 0 -x /(tests|scipy|pip|setuptools|fontTools|pygments)/ .venv/lib",
    "-m train fit --config configs/quickstart.py",
  ]
  assert make(project, "test").returncode == 0
  assert "scripts/locked.py train,dev\n" in log.read_text()


def test_docs_are_built_strictly_with_their_own_extra(project):
  log = with_copying_tools(project)
  fake_python(project / "bin" / "python3", log=log)
  assert make(project, "docs").returncode == 0
  assert "scripts/locked.py train,dev,notebooks,docs\n" in log.read_text()
  assert log.read_text().splitlines()[-1] == "-m mkdocs build --strict"


def test_second_call_installs_nothing(project):
  log = with_copying_tools(project)
  fake_python(project / "bin" / "python3", log=log)
  make(project, "train")
  log.write_text("")
  assert make(project, "train", "ARGS=--set steps=3").returncode == 0
  assert log.read_text() == "-m train fit --config configs/quickstart.py --set steps=3\n"


def make_newer(project: Path, name: str) -> None:
  """Gives a file a time after that of the environment."""
  later = (project / ".venv/.ready-train").stat().st_mtime + 10
  os.utime(project / name, (later, later))


def test_pull_that_changes_only_times_installs_nothing(project):
  log = with_copying_tools(project)
  fake_python(project / "bin" / "python3", log=log)
  make(project, "test")  # has what `make train` needs
  for name in ("constraints.txt", "pyproject.toml"):
    make_newer(project, name)
  log.write_text("")
  assert make(project, "train").returncode == 0
  assert log.read_text() == "-m train fit --config configs/quickstart.py\n"


def test_failed_installation_keeps_the_environment_until_one_succeeds(project):
  """Offline after a pull; then the pull is undone, with which pip is content."""
  log = with_copying_tools(project)
  fake_python(project / "bin" / "python3", log=log)
  make(project, "train")
  python, pins = project / ".venv/bin/python", project / "constraints.txt"
  good, before = python.read_text(), pins.read_text()
  offline = '"-m pip --version") ;;\n  "-m pip "*) exit 1 ;;'
  python.write_text(good.replace('"-m pip --version") ;;', offline))
  pins.write_text(before + "# changed\n")
  make_newer(project, "constraints.txt")
  done = make(project, "train")
  assert done.returncode != 0
  assert "make VENV= PYTHON=.venv/bin/python" in done.stderr
  assert (project / ".venv/.ready-train").exists() and python.exists()
  python.write_text(good)
  pins.write_text(before)
  log.write_text("")
  assert make(project, "train").returncode == 0
  assert "-m pip install" in log.read_text()  # it may have been changed in part
  log.write_text("")
  assert make(project, "train").returncode == 0
  assert "-m pip install" not in log.read_text()


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
    with (project / "constraints.txt").open("a") as file:
      file.write("# changed\n")
    make_newer(project, "constraints.txt")
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
  assert "scripts/locked.py train,cuda13\n" in log.read_text()
  program(project / "bin" / "nvidia-smi", "echo 550.54.15")
  done = make(project, "train", "VENV=.venv-old-driver")
  assert "driver 550.54.15 is older than 580" in done.stdout
  assert "scripts/locked.py train\n" in log.read_text()


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
  assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==\S+", line) for line in pins) and len(pins) > 100
  assert "constraints.txt --editable .[train,dev]" in log.read_text()


@pytest.fixture(scope="module")
def locked():
  spec = importlib.util.spec_from_file_location("locked", ROOT / "scripts" / "locked.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def names_of(lines: str) -> set[str]:
  return set(re.findall(r"^([\w.-]+)==", lines, re.MULTILINE))


def installed(requirement: str, seen: set[tuple[str, str]]) -> set[str]:
  """Packages that `requirement` needs here, by the metadata of what is installed."""
  wanted = Requirement(requirement)
  name = canonicalize_name(wanted.name)
  for extra in {"", *wanted.extras} - {extra for other, extra in seen if other == name}:
    seen.add((name, extra))
    for child in map(Requirement, metadata.requires(name) or []):
      if child.marker is None or child.marker.evaluate({"extra": extra}):
        installed(str(child), seen)
  return {name for name, _ in seen}


@pytest.mark.parametrize("extras", [("train",), ("train", "dev")])
def test_locked_requirements_complete_and_of_these_extras_only(locked, extras):
  names = names_of(locked.select(list(extras)))
  needed = installed(f"lnssm-jax[{','.join(extras)}]", set()) - {"lnssm-jax"}
  assert needed - names == set()
  # Two build the project, the others are for other platforms.
  others = {"pip", "setuptools", "colorama", "nest-asyncio", "httpx2-jsfetch"}
  assert names - needed <= others
  assert {"pip", "setuptools"} <= names


def test_locked_requirements_of_gpus_add_the_cuda_packages(locked):
  alone, gpu = (names_of(locked.select(extras)) for extras in (["train"], ["train", "cuda13"]))
  assert alone < gpu
  assert {"jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-nccl-cu13"} <= gpu - alone


def test_locked_unknown_extra_and_package_rejected(locked, tmp_path):
  with pytest.raises(LookupError, match="extra 'trian' is none of train, "):
    locked.select(["trian"])
  for name in ("pyproject.toml", "constraints.txt"):
    text = (ROOT / name).read_text().replace('"flax>=', '"flox>=')
    (tmp_path / name).write_text(text)
  with pytest.raises(LookupError, match=r"flox is not in constraints\.txt; run `make constraints`"):
    locked.select(["train"], tmp_path)


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-cuda13.txt"])
def test_lock_pins_and_hashes_every_package_and_names_no_host(locked, name):
  text = (ROOT / name).read_text()
  assert "://" not in text and "index" not in re.sub(r"#.*", "", text)
  entries = locked.read(ROOT / name)
  assert len(entries) > 40
  for package, (lines, _) in entries.items():
    assert re.match(
      r"[\w.-]+==[\w.]+[ \w.;='()\"!<-]* \\\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+\Z", lines
    ), package
