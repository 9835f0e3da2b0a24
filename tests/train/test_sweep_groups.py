"""Groups of a sweep: runs that are trained together, the key of their state, their scores."""

import dataclasses

import numpy as np
import pytest

from tests.train.test_sweeps import recall_runs, text_runs
from train.sweeps import groups, spec

LOCAL = {"watch": ("wandb",), "compile_cache": None, "log_every": 7, "eval_every": 7}
LOCAL |= {"checkpoint_every": 7, "run_dir": "other", "run_name": "a", "run_group": "b"}


@pytest.mark.parametrize("name", [*LOCAL, "run_tags"])
def test_runs_that_differ_in_what_changes_no_number_are_one_group(name):
  runs = recall_runs()
  others = [
    dataclasses.replace(run, cfg=dataclasses.replace(run.cfg, **{name: LOCAL.get(name, ("c",))}))
    for run in runs
  ]
  assert [len(each.runs) for each in groups.group([*runs, *others])] == [8]


def test_runs_that_differ_in_a_number_are_groups_of_their_own(tiny):
  """Also in rounding, which decides when recall is learned, and in what is scored."""
  changes = [{"steps": 13}, {"accumulate": 2}, {"loss_chunk": 8}, {"eval_tokens": 64}]
  changes += [{"seq_len": 16}, {"global_batch": 8}, {"optimizer__warmup_steps": 2}]
  changes += [{"data__boundaries": "ignore"}, {"model__dim": 64}, {"model__remat": "full"}]
  runs = [run for change in ({}, *changes) for run in text_runs(tiny, **change)]
  assert [len(each.runs) for each in groups.group(runs)] == [4] * (len(changes) + 1)
  for change in ({"pairs": 2}, {"power": 0.1}, {"train_rows": 8}, {"random_fillers": True}):
    others = [
      dataclasses.replace(run, task=dataclasses.replace(run.task, **change))
      for run in recall_runs()
    ]
    assert [len(each.runs) for each in groups.group([*recall_runs(), *others])] == [4, 4]


def test_state_of_a_group_belongs_to_its_seeds_and_rates():
  key = lambda runs: groups.Group(runs).key
  first, second, third, _ = runs = recall_runs()
  assert [(run.cfg.seed, spec.rate_of(run)) for run in (first, second, third)] == [
    (0, 3e-3),
    (1, 3e-3),
    (0, 1e-2),
  ]
  parts = [runs, [first], [second], [third], [first, second], [second, first], [first, third]]
  assert len(set(map(key, parts))) == len(parts)
  assert key(runs) == key(recall_runs())
  halves = groups.Group([*runs, first]).halves
  assert [len(half.runs) for half in halves] == [3, 2]
  assert [*halves[0].runs, *halves[1].runs] == [*runs, first]


LACKING = [{"optimizer__ema_decay": 0.9}, {"mesh__data": 2}]
LACKING += [{"callbacks": {"train.callbacks:loss_curves": {}}}]


@pytest.mark.parametrize("changes", LACKING, ids=str)
def test_runs_with_settings_that_copies_lack_are_alone(tiny, changes):
  found = groups.group(text_runs(tiny, **changes))
  assert [(len(each.runs), each.alone) for each in found] == [(1, True)] * 4
  assert [each.alone for each in groups.group(text_runs(tiny))] == [False]


def test_scores_are_those_of_each_set_that_are_numbers(tiny):
  rows = [
    {"set": "a", "val_loss": 2.0, "bits_per_byte": 1.0},
    {"set": "b", "val_loss": 3.0, "bits_per_byte": None},
  ]
  scores = groups.text_scores(rows)
  assert scores == {"a loss": 2.0, "b loss": 3.0, "a bits per byte": 1.0}
  run = text_runs(tiny)[0]
  row = groups.result_row(run, 5, scores | {"b loss": np.nan, "c loss": np.inf}, None)
  assert row["scores"] == scores | {"b loss": None, "c loss": None} and row["step"] == 5
