"""Mixtures of sets: shares, epochs of each set, one stream for any reader."""

import collections

import numpy as np
import pytest

from tests.data.test_windows import digest, take
from train.config import ConfigError, Data, apply_overrides
from train.data.bits_per_byte import tokens_per_byte
from train.data.windows import Mixture, TokenWindows, train_batches

WEIGHTS = {"a": 5.0, "b": 3, "c": 1.1}


@pytest.fixture
def mixture(write_pair):
  """Sets of 11, 7 and 5 windows of 4 tokens; tokens say the set and the window."""
  sets = {}
  for number, (name, count) in enumerate((("a", 11), ("b", 7), ("c", 5))):
    ids = 100 * number + np.arange(4 * count + 1) // 4
    sets[name] = TokenWindows(write_pair([ids], name), seq_len=4, vocab_size=400)
  return Mixture(sets, WEIGHTS)


def rows(batches):
  """(set, window) of each row."""
  return [divmod(int(row[0]), 100) for batch in batches for row in batch["tokens"]]


def stream(mixture, steps, **options):
  options = {"seed": 3, "global_batch": 6} | options
  return take(train_batches(mixture, **options), steps)


@pytest.mark.slow
def test_each_set_has_its_share_of_any_stretch_of_rows(mixture):
  found = np.array([each for each, _ in rows(stream(mixture, 110))])
  for number, share in enumerate(mixture.shares.values()):
    counts = np.cumsum(np.append(0, found == number))
    for size in (50, 600):
      given = counts[size:] - counts[:-size]
      assert np.abs(given - size * share).max() <= 3
  assert sum(mixture.shares.values()) == pytest.approx(1)


def test_each_set_is_read_in_epochs_of_its_own(mixture):
  """The k-th row of a set is the k-th row of the set alone: each window once per epoch."""
  by_set = collections.defaultdict(list)
  found = rows(stream(mixture, 60))
  for number, window in found:
    by_set[number].append(window)
  for number, count in enumerate((11, 7, 5)):
    windows = by_set[number]
    epochs = [windows[i : i + count] for i in range(0, len(windows) - count + 1, count)]
    assert len(epochs) > 1 and all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1
    expected = list(mixture.epochs(360).values())[number]
    assert len(windows) / count == pytest.approx(expected, abs=3 / count)


@pytest.mark.parametrize("order", ["windows", "random_crops"])
def test_sets_of_equal_size_have_orders_and_places_of_their_own(write_pair, order):
  """By seed and name: none of them is that of the other set, of another seed, or in turn."""
  ids = np.arange(4 * 50 + 1) // 4
  sets = {name: TokenWindows(write_pair([ids], name), 4, 400) for name in "ab"}
  seen = set()
  for seed in (0, 1):
    batches = train_batches(Mixture(sets, {"a": 1, "b": 1}), seed=seed, global_batch=2, order=order)
    both = np.stack([batch["tokens"][:, 0] for batch in take(batches, 25)], axis=1)
    seen |= {tuple(row) for row in both.tolist()}
  assert len(seen) == 4 and tuple(range(25)) not in seen


@pytest.mark.parametrize("order", ["windows", "random_crops"])
def test_stream_is_a_function_of_seed_and_step(mixture, order):
  """For any first step, number of threads, and processes that share the rows."""
  whole = stream(mixture, 25, order=order)
  for start, threads in ((0, 0), (1, 1), (13, 5), (24, 2)):
    rest = stream(mixture, 25 - start, order=order, start=start, threads=threads)
    assert digest(rest) == digest(whole[start:])
  for processes in (2, 3):
    size = 6 // processes
    shards = [
      stream(mixture, 9, order=order, rows=range(first, first + size))
      for first in range(0, 6, size)
    ]
    for batch, *pieces in zip(whole, *shards, strict=False):
      for key, value in batch.items():
        np.testing.assert_array_equal(np.concatenate([piece[key] for piece in pieces]), value)
  assert digest(stream(mixture, 25, order=order, seed=4)) != digest(whole)


def test_stream_unchanged_since_first_version(mixture):
  # Pinned: a change here, ours or Grain's, means that runs no longer resume where they stopped.
  assert digest(stream(mixture, 30)) == (
    "454c96dc86779b904d1f20118f691a6337bc118763c97a0b066ff9085effd2fd"
  )


@pytest.mark.slow
def test_rows_far_into_a_run_keep_their_shares(mixture):
  far = rows(stream(mixture, 100, start=2**40))
  counts = collections.Counter(each for each, _ in far)
  for number, share in enumerate(mixture.shares.values()):
    assert abs(counts[number] - 600 * share) <= 3


def test_bytes_per_token_of_a_mixture_are_a_mean_by_weight(corpus):
  from train.data import prepare

  data = corpus.settings(train={"a": 3, "b": 1})
  sidecars = prepare(data)
  per_token = {name: sidecars[name]["bytes"] / sidecars[name]["tokens"] for name in "ab"}
  found = tokens_per_byte(data.folder, data.train)
  assert 1 / found == pytest.approx(0.75 * per_token["a"] + 0.25 * per_token["b"])


def test_weights_in_configs_and_overrides(tiny_config):
  cfg = apply_overrides(tiny_config, ["data.train={'a': 1, 'b': 0.5}"])
  assert cfg.data.train == {"a": 1.0, "b": 0.5}
  assert apply_overrides(cfg, ["data.train=a"]).data.train == ("a",)
  assert apply_overrides(cfg, ["data.train=a,b"]).data.train == ("a", "b")


@pytest.fixture
def tiny_config():
  from tests.train.test_copies import settings

  return settings()


@pytest.mark.parametrize(
  ("train", "message"),
  [
    ({"a": 0.0}, "data.train.a=0.0 is the weight of a set"),
    ({"a": float("inf")}, "data.train"),
    ({}, "data.train is empty"),
    ({"a/b": 1.0}, "data.train holds 'a/b'"),
  ],
)
def test_wrong_weights_rejected(train, message):
  with pytest.raises(ConfigError, match=message):
    Data(folder="-", tokenizer="bytes", train=train)
