"""Short runs of the commands of tests/reliability; long ones are marked slow."""

import pytest

from tests.reliability import faults
from train.checkpoint import digests


@pytest.mark.parametrize("count", [25, pytest.param(1000, marks=pytest.mark.slow)])
def test_reliability_damaged_checkpoints_never_loaded(count, capsys):
  assert faults.main(["--faults", str(count), "--no-orbax"]) == 0
  assert capsys.readouterr().out.splitlines()[-1].startswith("all ")


@pytest.mark.slow
def test_reliability_planted_wrong_state_detected(monkeypatch, capsys):
  monkeypatch.setattr(faults, "FAULTS", (faults.another_step,))
  monkeypatch.setattr(faults, "WEIGHTS", (1,))
  monkeypatch.setattr(digests, "damage", lambda *_, **__: None)
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
def test_reliability_commands_succeed(name, arguments, command):
  # In a separate process, because they fork before JAX has started.
  process = command("-W", "default", "-m", f"tests.reliability.{name}", *arguments)
  out, errors = process.communicate(timeout=1800)
  assert process.returncode == 0, errors
  assert out
