"""Multi-query associative recall: rows as the published task describes them."""

import numpy as np
import pytest

from experiments.mqar import IGNORED, MQAR


@pytest.mark.parametrize("random_fillers", [False, True])
def test_each_key_returns_once_and_its_value_is_asked_for_there(random_fillers):
  task = MQAR(length=64, pairs=8, vocab_size=100, random_fillers=random_fillers)
  tokens, positions, targets = found = task.examples(50, seed=3)
  keys, values = tokens[:, :16:2], tokens[:, 1:16:2]
  assert ((keys >= 1) & (keys < 50)).all()
  assert ((values >= 50) & (values < 100)).all()
  assert set(keys.flat) == {*range(1, 50)} and set(values.flat) == {*range(50, 100)}  # any of them
  for array in (keys, values, positions):
    assert (np.diff(np.sort(array, axis=1), axis=1) > 0).all()  # different
  assert ((positions >= 16) & (positions < 64) & (positions % 2 == 0)).all()
  np.testing.assert_array_equal(np.take_along_axis(tokens, positions, 1), keys)
  np.testing.assert_array_equal(targets, values)
  labels = found.labels()
  assert (labels != IGNORED).sum() == targets.size
  np.testing.assert_array_equal(np.take_along_axis(labels, positions, 1), values)
  meaning = np.zeros(tokens.shape, bool)
  meaning[:, :16] = True
  np.put_along_axis(meaning, positions, True, axis=1)
  fillers = tokens[~meaning].reshape(50, -1)
  if random_fillers:
    assert set(fillers.flat) == {*range(100)} and len(set(map(bytes, fillers))) == 50
  else:
    assert not fillers.any()


def test_gaps_follow_the_power_law_without_replacement():
  """Gap i of the first pair has a chance of (i + 1)^(a - 1); the second is of those that remain."""
  task = MQAR(length=24, pairs=2, vocab_size=100, power=0.01)
  positions = task.examples(200_000, seed=0).positions
  gaps = (positions - 4) // 2
  chance = np.arange(1, 11) ** -0.99
  chance /= chance.sum()
  share = np.bincount(gaps[:, 0], minlength=10) / len(gaps)
  np.testing.assert_allclose(share, chance, atol=0.004)
  second = np.bincount(gaps[gaps[:, 0] == 0, 1], minlength=10)
  np.testing.assert_allclose(
    second / second.sum(), [0, *(chance[1:] / chance[1:].sum())], atol=0.01
  )


def test_the_same_seed_gives_the_same_rows():
  task = MQAR(length=32, pairs=4)
  first, again, other = (task.examples(8, seed) for seed in (2**31, 2**31, 1))
  np.testing.assert_array_equal(first.tokens, again.tokens)
  assert (first.tokens != other.tokens).any()


def test_rows_beyond_a_block_continue_its_random_numbers():
  task = MQAR(length=16, pairs=2, vocab_size=40)
  tokens = task.examples(2000, seed=0).tokens
  assert tokens.shape == (2000, 16)
  np.testing.assert_array_equal(tokens[:1000], task.examples(1000, seed=0).tokens)
  assert (tokens[1000:] != tokens[:1000]).any(axis=1).mean() > 0.9


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"length": 33}, "length=33 must be even"),
    ({"length": 32, "pairs": 9}, "at least 4 pairs=36.*length=36"),
    ({"length": 64, "vocab_size": 64}, "vocab_size=64 must be above length=64"),
    ({"pairs": 0}, "pairs=0"),
    ({"power": -1.0}, "power=-1.0"),
    ({"power": float("inf")}, "power=inf must be from 0 to 10"),
    ({"power": 11.0}, "power=11.0 must be from 0 to 10"),
  ],
)
def test_settings_that_do_not_fit_raise(options, message):
  with pytest.raises(ValueError, match=message):
    MQAR(**options)
