"""The commands of benchmarks/reliability, in short; whole ones are slow."""

import pytest

from benchmarks.reliability import faults
from train import digests


@pytest.mark.parametrize("count", [25, pytest.param(1000, marks=pytest.mark.slow)])
def test_damaged_checkpoints_are_never_loaded(count, capsys):
  assert faults.main(["--faults", str(count), "--no-orbax"]) == 0
  assert capsys.readouterr().out.splitlines()[-1].startswith("all ")


def test_a_wrong_state_would_be_found(monkeypatch, capsys):
  monkeypatch.setattr(faults, "FAULTS", (faults.another_step,))
  monkeypatch.setattr(faults, "WEIGHTS", (1,))
  monkeypatch.setattr(digests, "damage", lambda folder, parts=None: None)
  assert faults.main(["--faults", "1", "--no-orbax"]) == 1
  assert "WRONG 1" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "arguments"),
  [
    ("kills", ["--kills", "10", "--steps", "2000"]),
    ("preempt", ["--processes", "2", "4", "--times", "1"]),
    ("elastic", ["--layouts", "0", "2", "4", "--steps", "8"]),
    ("poison", []),
  ],
)
def test_commands_find_nothing_wrong(name, arguments, command):
  # Of their own process, because they fork before JAX has started.
  process = command("-W", "default", "-m", f"benchmarks.reliability.{name}", *arguments)
  out, errors = process.communicate(timeout=1800)
  assert process.returncode == 0, errors
  assert out
