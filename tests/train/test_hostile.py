"""Files and settings that were made to do harm, in short; the command has long forms."""

import random

import pytest

from benchmarks.reliability import hostile
from benchmarks.reliability.escapes import SCENARIOS, linked_step
from train import digests
from train.run_folder import RunFolder

LONG = pytest.mark.slow


@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # of what --set holds
@pytest.mark.parametrize("count", [None, pytest.param(2000, marks=LONG)])
@pytest.mark.parametrize("name", hostile.TARGETS)
def test_whatever_a_file_holds_is_read_or_refused(name, count):
  outcomes, faults = hostile.trials(hostile.TARGETS[name], count or 25, seed=count or 1)
  assert faults == []
  assert outcomes["refused"] > outcomes["unharmed"]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_nothing_leads_out_of_a_checkpoint(scenario, tmp_path):
  assert scenario(tmp_path) is None


def test_a_fault_would_be_found(monkeypatch, tmp_path):
  monkeypatch.setattr(RunFolder, "load_config", lambda self: 1 / 0)
  assert hostile.attempt(RunFolder(tmp_path).load_config, None)[0] == "FAULT"
  monkeypatch.setattr(digests, "link_in", lambda folder: None)
  assert linked_step(tmp_path) is not None


def test_what_spoils_is_spread_over_all_kinds():
  rng = random.Random(0)
  spoiled = [hostile.spoil_json(b'{"a": {"b": [1, 2]}, "c": "x"}', rng) for _ in range(300)]
  assert any(len(raw) > 400_000 for raw in spoiled) and any(b"passwd" in raw for raw in spoiled)
  assert len(set(spoiled)) > 100
