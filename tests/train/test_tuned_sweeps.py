"""Sweeps whose learning rate one seed chooses, and sweeps that are stopped when they are saved."""

import dataclasses
import os
import signal

import pytest

from tests.train import test_shared_sweeps as shared
from tests.train.test_shared_sweeps import STEPS, Instant, finish
from tests.train.test_sweeps import quiet
from train.runs.run_folder import claim
from train.sweeps import groups, tables, training, tuning

sweep, trained = shared.sweep, shared.trained  # fixtures


def test_tuning_seed_chooses_the_rate_at_which_the_other_seeds_train(sweep, trained):
  tuned = dataclasses.replace(sweep, tuning_seed=0)
  planned = tuning.chosen(tuned, planned=True)
  assert [sweep.runs.index(run) for run in planned] == [0, 1, 2, 4, 5, 6, 8, 9, 10]
  finish(sweep.runs[4])
  said = []
  outcome = training.train(tuned, say=said.append)
  assert [line for line in said if line.startswith(("group", "other"))] == [
    *("group 1 of 3: global_batch=2, 2 runs", "other seeds at the best rate: global_batch=2"),
    *("group 2 of 3: global_batch=4", "other seeds at the best rate: global_batch=4"),
    *("group 3 of 3: global_batch=8, 2 runs", "other seeds at the best rate: global_batch=8"),
  ]
  assert trained(sweep) == [[0, 2], [3], [6], [7], [8, 10], [11]]  # more is better
  assert [sweep.runs.index(run) for run in outcome.runs] == [0, 2, 3, 4, 6, 7, 8, 10, 11]
  assert None not in outcome.scores and not (sweep.folder / "unfinished").exists()
  training.train(tuned, say=quiet)
  assert len(trained(sweep)) == 6
  rows = tables.table(outcome.runs, outcome.scores)
  assert [(row["runs"], row["best"]) for row in rows] == [(1, False), (2, True)] * 3
  rows = tables.table(outcome.runs, outcome.scores, tuning_seed=0)
  assert [(row["runs"], row["best"]) for row in rows] == [(1, False), (1, True)] * 3
  scores = [outcome.scores[outcome.runs.index(sweep.runs[i])] for i in (3, 7, 11)]
  assert [row["accuracy"] for row in rows if row["best"]] == [of["accuracy"] for of in scores]
  uses = [row["use"] for row in tables.run_rows(outcome.runs, outcome.scores, tuning_seed=0)]
  assert uses == ["tuning", "tuning", "result"] * 3
  assert "not finished" not in tables.markdown(outcome.runs, rows)


@pytest.mark.parametrize(
  ("scores", "tried"),
  [
    ((None, 1, 3, 2, None), [1, 2, 3]),
    ((None, 1, 2, 3, None), [1, 2, 3, 4]),
    ((None, 1, 2, 3, 4), [1, 2, 3, 4]),
    ((None, 3, 2, 1, None), [0, 1, 2, 3]),
    ((2, 3, 2, 1, None), [0, 1, 2, 3]),
    ((None, 3, None, 1, None), [1, 2, 3]),
  ],
)
def test_further_rates_are_tried_while_the_best_is_at_an_edge(scores, tried):
  rates = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
  known = [None if x is None else {"accuracy": x} for x in scores]
  of_rates = list(zip(rates, known, strict=True))
  for sign in (1, -1):
    flipped = [(rate, of and {"accuracy": sign * of["accuracy"]}) for rate, of in of_rates]
    found = tuning._until_inside(flipped[::-1], rates[1:4], "accuracy", sign)
    assert [rate for rate, _ in found] == [rates[i] for i in tried]


def test_first_rates_are_extended_in_training_and_the_other_seeds_follow(sweep, trained):
  training.train(dataclasses.replace(sweep, tuning_seed=0, first_rates=(3e-3,)), say=quiet)
  assert trained(sweep) == [[0], [2], [3], [4], [6], [7], [8], [10], [11]]  # more is better


def test_tuning_seed_of_another_process_is_waited_for_and_a_diverged_one_has_no_rate(
  sweep, trained
):
  tuned = dataclasses.replace(sweep, tuning_seed=0)
  with claim(sweep.runs[6].cfg):
    training.train(tuned, say=quiet)
  assert trained(sweep) == [[0, 2], [3], [8, 10], [11]]
  for run in (sweep.runs[4], sweep.runs[6]):
    with claim(run.cfg) as folder:
      folder.write_config(run.cfg)
      folder.append([groups.result_row(run, STEPS, {"accuracy": None}, None)])
  outcome = training.train(tuned, say=quiet)
  assert len(trained(sweep)) == 4 and None not in outcome.scores


def test_rate_with_most_seeds_is_the_best_although_one_seed_has_a_better_score(sweep):
  runs = [sweep.runs[i] for i in (0, 2, 3)]
  scores = [{"accuracy": 0.8}, {"accuracy": 0.9}, {"accuracy": 0.5}]
  rows = tables.table(runs, scores)
  assert [(row["learning_rate"], row["best"]) for row in rows] == [(3e-3, False), (1e-2, True)]


def test_sweep_stopped_right_after_it_was_saved_saves_no_step_twice(sweep, trained, monkeypatch):
  monkeypatch.setattr(training, "SAVE_SECONDS", 0.0)
  measure = Instant.measure

  def stopped(self, *given):
    rows = measure(self, *given)
    os.kill(os.getpid(), signal.SIGTERM)
    return rows

  with monkeypatch.context() as patch:
    patch.setattr(Instant, "measure", stopped)
    outcome = training.train(sweep, say=quiet)
  assert outcome.stopped_by == "SIGTERM" and outcome.finished == 0
  said = []
  assert None not in training.train(sweep, say=said.append).scores
  assert "resuming after step 3 of 7" in said
