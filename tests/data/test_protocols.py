"""Data protocols of papers: boundaries ignored, random crops, documents one by one."""

import collections

import numpy as np
import pytest

from tests.data.test_windows import digest, documents, take
from train.data import DataError
from train.data.windows import Documents, TokenWindows, eval_batches, train_batches


@pytest.fixture
def tokens(write_pair):
  """Two datasets of 100 and 40 distinct tokens, so that a token says where it was."""
  first, second = np.split(np.arange(140), [100])
  return [write_pair(np.split(first, [3, 4, 30, 90]), "a"), write_pair([second], "b")]


def crops(source, count, seed=0, **options):
  """Rows of `count` batches of 8 random crops."""
  batches = train_batches(source, seed=seed, global_batch=8, order="random_crops", **options)
  return take(batches, count)


def test_ignored_boundaries_are_those_of_one_document(tokens):
  reset, ignore = (TokenWindows(tokens, 10, 140, boundaries=how) for how in ("reset", "ignore"))
  assert len(reset) == len(ignore)
  changed = 0
  for i in range(len(reset)):
    for name in ("tokens", "targets"):
      np.testing.assert_array_equal(ignore[i][name], reset[i][name])
    assert not ignore[i]["segment_ids"].any() and (ignore[i]["weights"] == 1).all()
    changed += (reset[i]["weights"] == 0).sum()
  assert changed == 4


@pytest.mark.parametrize("boundaries", ["reset", "ignore"])
def test_random_crops_start_anywhere_equally_often(tokens, boundaries):
  source, seen = TokenWindows(tokens, 10, 140, boundaries), collections.Counter()
  starts = [0, 3, 4, 30, 90, 100]
  for batch in crops(source, 500):
    windows, targets = batch["tokens"], batch["targets"]
    seen.update(windows[:, 0].tolist())
    np.testing.assert_array_equal(windows, windows[:, :1] + np.arange(10))
    np.testing.assert_array_equal(targets, windows + 1)
    inner = ~np.isin(targets, starts) if boundaries == "reset" else np.ones_like(targets)
    np.testing.assert_array_equal(batch["weights"], inner)
  # The last targets are the last tokens: 100 - 10 and 40 - 10 places, 4,000 draws.
  assert set(seen) == {*range(90), *range(100, 130)}
  expected = 4000 / 120
  chi_squared = sum((count - expected) ** 2 / expected for count in seen.values())
  assert chi_squared < 119 + 5 * (2 * 119) ** 0.5


def test_random_crops_are_a_function_of_seed_and_position(tokens):
  source = TokenWindows(tokens, 10, 140)
  whole = crops(source, 30)
  for threads, prefetch in ((0, 0), (1, 1), (5, 16)):
    assert digest(crops(source, 30, threads=threads, prefetch=prefetch)) == digest(whole)
  for start in (1, 17, 29):
    assert digest(crops(source, 30 - start, start=start)) == digest(whole[start:])
  parts = [crops(source, 30, rows=range(first, first + 4)) for first in (0, 4)]
  for batch, *pieces in zip(whole, *parts, strict=True):
    np.testing.assert_array_equal(np.concatenate([p["tokens"] for p in pieces]), batch["tokens"])
  assert digest(crops(source, 30, seed=1)) != digest(whole)
  rows = [row.tobytes() for batch in whole for row in batch["tokens"]]
  assert len(set(rows)) < len(rows)  # with replacement
  assert crops(source, 1, start=10**9)[0]["tokens"].shape == (8, 10)
  # Pinned: a change means that runs no longer resume where they stopped.
  assert [int(row[0]) for row in whole[0]["tokens"]] == PINNED


PINNED = [43, 33, 30, 3, 111, 17, 79, 107]


def test_documents_alone_cut_and_weighted(write_pair):
  prefix = write_pair([[1, 2, 3], [4], [], [5, 6, 7, 8, 9, 10], [11, 12]])
  source = Documents(prefix, length=4, vocab_size=13)
  assert (len(source), source.num_predicted) == (3, 2 + 3 + 1)
  names = ("tokens", "targets", "segment_ids", "weights")
  assert [[source[i][name].tolist() for name in names] for i in range(3)] == [
    [[1, 2, 0, 0], [2, 3, 0, 0], [0, 0, 1, 1], [0.5, 0.5, 0, 0]],
    [[5, 6, 7, 0], [6, 7, 8, 0], [0, 0, 0, 1], [*[np.float32(1 / 3)] * 3, 0]],
    [[11, 0, 0, 0], [12, 0, 0, 0], [0, 1, 2, 3], [1, 0, 0, 0]],
  ]
  (batch,) = eval_batches(source, 4)
  assert batch["tokens"].shape == (4, 4) and not batch["weights"][3].any()
  window = TokenWindows(prefix, 4, 13)[0]
  assert {k: v.dtype for k, v in batch.items()} == {k: v.dtype for k, v in window.items()}


def test_documents_of_one_token_are_none(write_pair):
  assert len(Documents(write_pair([[1], [2]]), 4, 3)) == 0


def test_protocols_unknown_or_impossible_named(write_pair):
  rng = np.random.default_rng(0)
  prefix = write_pair(documents(rng, 9))
  with pytest.raises(DataError, match="boundaries='keep' must be 'reset' or 'ignore'"):
    TokenWindows(prefix, 8, 1000, boundaries="keep")
  with pytest.raises(DataError, match="order='sorted' must be 'windows' or 'random_crops'"):
    train_batches(TokenWindows(prefix, 8, 1000), seed=0, global_batch=1, order="sorted")
  with pytest.raises(DataError, match="length=1 must be at least 2"):
    Documents(prefix, 1, 1000)
  with pytest.raises(DataError, match=r"has the id .*model.vocab_size"):
    Documents(prefix, 8, 10)
