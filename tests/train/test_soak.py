"""The judgments of `tests.reliability.soak`, without its processes; a short run is slow."""

import collections
import json
import os
import random
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.reliability import soak, soak_campaign, soak_faults
from tests.reliability.soak_campaign import Campaign, Count
from tests.reliability.soak_faults import Harm


def row(step, loss=2.0):
  return {"kind": "train", "step": step, "loss": loss, "grad_norm": 1.0, "param_norm": 3.0}


@pytest.fixture
def campaign(tmp_path):
  """Of a run of 4 steps, which has all of its rows."""
  table = collections.defaultdict(Count)
  campaign = Campaign(tmp_path, 1, 4, table, random.Random(0))
  (Path(campaign.reference.run_dir) / "programs").mkdir(parents=True)
  campaign.say = lambda line: None
  campaign.renew()
  campaign.last, campaign.reached = "SIGTERM", 4
  write(campaign, [row(step) for step in range(1, 5)])
  campaign.expected = campaign.rows = soak_campaign.rows_of(campaign.cfg)
  return campaign


def write(campaign, rows):
  campaign.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))


def harm(campaign, target="token files", name="tokens/train.bin"):
  path = campaign.root / name
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(b"damaged")
  campaign.harm = Harm(target, path, b"whole", 10**18)
  return path


@pytest.mark.parametrize("change", ["none", "last bit", "missing", "damaged"])
def test_soak_any_other_row_is_a_silent_error(change, campaign):
  rows = [row(step) for step in range(1, 5)]
  if change == "last bit":
    rows[2] = row(3, 2.0000000000000004)
  elif change == "missing":
    del rows[1]
  write(campaign, rows)
  if change == "damaged":
    campaign.metrics.write_text(campaign.metrics.read_text() + "{\n")
  campaign.compare()
  assert campaign.table["SIGTERM"].silent == (change != "none")


@pytest.mark.parametrize(
  ("errors", "named"),
  [
    ("error: the token files tokens/train are not as they were written", True),
    ("error: something is wrong", False),  # without the name of what was damaged
    ("Traceback (most recent call last):\nerror: tokens/train", False),
  ],
)
def test_soak_error_counts_as_right_only_if_it_names_the_damage(errors, named, campaign):
  path = harm(campaign)
  campaign.examine_error([2], errors)
  count = campaign.table["SIGTERM"]
  assert (count.rejected, count.wrong) == (named, not named)
  assert path.read_bytes() == b"whole" and campaign.harm is None
  assert path.stat().st_mtime_ns == 10**18
  campaign.examine_error([2], errors)  # now nothing is damaged
  assert count.wrong == 2 - named


@pytest.mark.parametrize(
  ("codes", "sent", "expected"),
  [
    ([0], signal.SIGTERM, True),
    ([129], signal.SIGHUP, True),
    ([0], signal.SIGHUP, False),
    ([-9], signal.SIGKILL, True),
    ([1], signal.SIGTERM, False),
    ([-9, 1], signal.SIGKILL, True),
    ([-9, 0], signal.SIGKILL, False),  # the other cannot have finished
  ],
)
def test_soak_exit_codes_as_the_signal_demands(codes, sent, expected, campaign):
  (campaign.metrics.parent / "checkpoints" / "4").mkdir(parents=True)
  (campaign.metrics.parent / "checkpoints" / "4" / "x").touch()
  assert campaign.as_expected(codes, (0, sent), complete=False) == expected
  assert not campaign.table["SIGTERM"].silent


def test_soak_success_without_the_last_step_is_a_silent_error(campaign):
  assert campaign.as_expected([0], (0, signal.SIGTERM), complete=False)
  assert campaign.table["SIGTERM"].silent == 1


def test_soak_next_run_finds_whole_data(campaign):
  path = harm(campaign)
  campaign.renew()
  assert path.read_bytes() == b"whole" and campaign.harm is None


def test_soak_report_of_lost_rows_excuses_them(campaign):
  campaign.harm = Harm("metrics.jsonl", campaign.metrics, b"", 0)
  write(campaign, [row(step) for step in (1, 3, 4)])
  campaign.rows = soak_campaign.rows_of(campaign.cfg)
  campaign.settle(f"{campaign.metrics} has 3 rows up to step 4, of 4: the others are lost\n")
  campaign.compare()
  assert campaign.table["SIGTERM"].reported == 1
  assert campaign.table["SIGTERM"].silent == 0


def test_soak_complete_run_may_lack_the_rows_that_it_reports(campaign, monkeypatch):
  """Its file was deleted after the last step; the next start trains nothing, and says so."""
  (campaign.metrics.parent / "checkpoints" / "4").mkdir(parents=True)
  (campaign.metrics.parent / "checkpoints" / "4" / "x").touch()
  finished, ended = [], SimpleNamespace(exitcode=0, join=lambda patience: None)
  monkeypatch.setattr(campaign, "finish", lambda: finished.append(1))
  campaign.harm, campaign.harm_was_read = Harm("metrics.jsonl", campaign.metrics, b"", 0), True
  campaign.out.write_text(f"{campaign.metrics} has 0 rows up to step 4, of 4: the others are lost")
  campaign.errors.write_text("")
  write(campaign, [])
  for _ in range(2):
    campaign.ended([ended], None)
  count = campaign.table["SIGTERM"]
  assert (count.reported, count.wrong, count.silent, len(finished)) == (1, 0, 0, 2)


@pytest.mark.parametrize("change", dict.fromkeys(soak_faults.DAMAGES), ids=lambda c: c.__name__)
def test_soak_damage_is_done_and_undone(change, campaign, monkeypatch):
  path = campaign.metrics
  before, modified = path.read_bytes(), path.stat().st_mtime_ns
  monkeypatch.setattr(soak_faults, "DAMAGES", (change,))
  how, done = soak_faults.damage(campaign.cfg, "metrics.jsonl", random.Random(1))
  assert how == change.__name__
  assert not path.exists() or path.read_bytes() != before
  done.undo()
  assert (path.read_bytes(), path.stat().st_mtime_ns) == (before, modified)
  os.truncate(path, 0)
  assert soak_faults.damage(campaign.cfg, "metrics.jsonl", random.Random(1)) is None


def test_soak_table_has_a_line_per_fault_and_the_sum():
  table = {"a": Count(trials=2, rows=10, lost=[1, 2]), "b": Count(trials=1, silent=1)}
  lines = soak.show(table).splitlines()
  assert lines[2:] == [
    "| a | 2 | 10 | 1.5, 2 | 0 | 0 | 0 | 0 |",
    "| b | 1 | 0 | - | 0 | 0 | 0 | 1 |",
    "| all | 3 | 10 | 1.5, 2 | 0 | 0 | 0 | 1 |",
  ]


@pytest.mark.slow
def test_soak_short_run_finds_nothing_wrong(command):
  process = command(
    *("-W", "default", "-m", "tests.reliability.soak", "--minutes", "0.5", "--steps", "100"),
    *("--only", "at rest"),
  )
  out, errors = process.communicate(timeout=900)
  assert process.returncode == 0, out + errors
  assert "| all |" in out
