"""Short runs of the benchmark of hostile files and settings."""

import random

import pytest

from tests.reliability import hostile
from tests.reliability.escapes import SCENARIOS, linked_step
from train.checkpoint import digests
from train.runs.run_folder import RunFolder

LONG = pytest.mark.slow


@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # of what --set holds
@pytest.mark.parametrize("count", [None, pytest.param(2000, marks=LONG)])
@pytest.mark.parametrize("name", hostile.TARGETS)
def test_hostile_file_read_or_rejected(name, count):
  outcomes, faults = hostile.trials(hostile.TARGETS[name], count or 25, seed=count or 1)
  assert faults == []
  assert outcomes["rejected"] > outcomes["unharmed"]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_hostile_checkpoint_path_never_escapes(scenario, tmp_path):
  assert scenario(tmp_path) is None


def test_hostile_planted_fault_detected(monkeypatch, tmp_path):
  monkeypatch.setattr(RunFolder, "load_config", lambda self: 1 / 0)
  assert hostile.attempt(RunFolder(tmp_path).load_config, None)[0] == "FAULT"
  monkeypatch.setattr(digests, "link_in", lambda folder: None)
  assert linked_step(tmp_path) is not None


def test_hostile_corruptions_cover_all_kinds():
  rng = random.Random(0)
  corrupted = [hostile.corrupt_json(b'{"a": {"b": [1, 2]}, "c": "x"}', rng) for _ in range(300)]
  assert any(len(raw) > 400_000 for raw in corrupted) and any(b"passwd" in raw for raw in corrupted)
  assert len(set(corrupted)) > 100
