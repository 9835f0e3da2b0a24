"""`task listops` and `task image`: their rows; training is that of `task mqar`."""

import dataclasses

import numpy as np
import pytest

from experiments.command import main
from experiments.listops import ListOps
from experiments.pixels import Pixels

TASK = ListOps(length=80, min_length=20, max_length=70, max_depth=4, max_args=5)


def value_of(tokens):
  """(value, most arguments, depth) of ids, by a stack of its own."""
  names = {11: "min", 12: "max", 13: "median", 14: "sum"}
  stack, most, depth = [[]], 0, 1
  for token in tokens:
    if token == 15:
      name, *values = stack.pop()
      values.sort()
      middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) // 2
      result = {"min": values[0], "max": values[-1], "median": middle, "sum": sum(values) % 10}
      stack[-1].append(result[name])
      most = max(most, len(values))
    elif token > 10:
      stack.append([names[token]])
      depth = max(depth, len(stack))
    else:
      stack[-1].append(token - 1)
  ((value,),) = stack
  return value, most, depth


def test_expressions_have_their_value_at_the_last_bracket():
  rows = TASK.examples(300, 3)
  assert rows.tokens.shape == (300, 80) and rows.tokens.dtype == np.int32
  shapes = set()
  for tokens, (position,), (target,) in zip(*rows, strict=True):
    assert 20 < position + 1 < 70
    assert tokens[position] == 15 and not tokens[position + 1 :].any()
    value, most, depth = value_of(tokens[: position + 1].tolist())
    assert target == 1 + value
    shapes.add((most, depth))
  assert max(shapes)[0] == 5 and max(depth for _, depth in shapes) == 4
  used = np.bincount(rows.tokens.ravel(), minlength=16)
  assert used.size == 16 and (used[11:15] > 0.15 * used[15]).all() and (used[1:11] > 0).all()
  np.testing.assert_array_equal(TASK.examples(300, 3).tokens, rows.tokens)
  assert (TASK.examples(300, 4).tokens != rows.tokens).any()


def test_expressions_of_all_lengths_between_the_bounds_are_drawn_anew_in_each_block():
  task = dataclasses.replace(TASK, min_length=20, max_length=30)
  assert len(list(task._block(np.random.default_rng(0)))) < 100
  rows = task.examples(400, 0)
  assert set((rows.positions + 1).ravel()) == {*range(21, 30)}
  assert len(set(map(bytes, rows.tokens))) > 390


def test_operators_are_a_quarter_of_the_nodes_below_the_greatest_depth():
  """Two depths: of all expressions, a quarter is more than one digit."""
  task = dataclasses.replace(TASK, min_length=1, max_length=70, max_depth=2)
  rows = task.examples(400, 0)
  arguments = rows.positions[:, 0] - 1
  assert set(arguments) == {2, 3, 4, 5} and (rows.tokens[:, 0] > 10).all()
  shares = np.bincount(rows.tokens[rows.tokens > 0], minlength=15)[1:15] / [
    *[1400] * 10,
    *[400] * 4,
  ]
  np.testing.assert_allclose(
    shares, [*[0.1] * 10, *[0.25] * 4], rtol=0.25
  )  # of digits, of operators
  drawn = list(task._block(np.random.default_rng(0)))
  assert 0.22 < len(drawn) / 2000 < 0.28


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"length": 60}, r"length=60 does not hold expressions of up to 69 tokens"),
    ({"max_length": 25}, r"max_length=25 is less than 10 above min_length=20"),
    ({"max_args": 1}, r"max_args=1 must be at least 2"),
  ],
)
def test_settings_that_do_not_fit_raise(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(TASK, **change)


def test_command_writes_expressions(tiny, config_file, tmp_path, capsys):
  path, cfg = tmp_path / "data.npz", config_file(tiny(seq_len=69))
  command = ["listops", "--config", cfg, "--train-rows", "6", "--test-rows", "3"]
  shape = ["--min-length", "20", "--max-depth", "4", "--max-args", "5"]
  assert main([*command, *shape, "--write", str(path)]) == 0
  with np.load(path) as data:
    expected = dataclasses.replace(TASK, length=69).examples(3, 2**31)
    np.testing.assert_array_equal(data["test_tokens"], expected.tokens)
    np.testing.assert_array_equal(data["test_labels"], expected.labels())
  capsys.readouterr()
  assert main(command) == 2  # 500 tokens at least, of 69
  (line,) = capsys.readouterr().err.splitlines()
  assert "max_length=70 is less than 10 above min_length=500" in line


def test_images_are_rows_of_gray_values_with_a_class(tiny, config_file, tmp_path, capsys):
  rng = np.random.default_rng(0)
  arrays = {name: rng.integers(0, 256, (5, 2, 3), np.uint8) for name in ("a_x", "b_x")}
  np.savez(tmp_path / "i.npz", **arrays, a_y=np.arange(5), b_y=np.array([4, 0, 0, 1, 2]))
  task = Pixels(train=f"{tmp_path}/i.npz:a", test=f"{tmp_path}/i.npz:b")
  assert (task.length, task.vocabulary) == (6, 261)
  for name, labels, seed in (("a_x", range(5), 0), ("b_x", [4, 0, 0, 1, 2], 2**31)):
    rows = task.examples(9, seed)
    assert rows.tokens.shape == (5, 6) and (rows.positions == 5).all()
    pairs = {(tuple(x.ravel().tolist()), y) for x, y in zip(arrays[name], labels, strict=True)}
    found = zip(rows.tokens.tolist(), (rows.targets[:, 0] - 256).tolist(), strict=True)
    assert {(tuple(x), y) for x, y in found} == pairs
  orders = [task.examples(9, seed).targets.ravel().tolist() for seed in range(6)]
  assert (
    len(set(map(tuple, orders))) > 3 and orders[0] == task.examples(9, 0).targets.ravel().tolist()
  )
  np.savez(tmp_path / "wide.npz", b_x=np.repeat(arrays["b_x"], 3, axis=2), b_y=np.zeros(5, int))
  wide = dataclasses.replace(task, test=f"{tmp_path}/wide.npz:b").examples(9, 2**31)
  assert wide.tokens.shape == (5, 6)  # as those to train on
  sets = [task.train, task.test]
  command = ["image", *sets, "--config", config_file(tiny(seq_len=8))]
  assert main([*command, "--set", "model.vocab_size=261"]) == 2
  assert "seq_len=8 is not the 6 pixels of an image" in capsys.readouterr().err
  assert main(command) == 2
  assert "vocab_size=261 of the task is larger than model.vocab_size=257" in capsys.readouterr().err
  with pytest.raises(ValueError, match=r"no file .*; set TRAIN to your images"):
    Pixels(train=f"{tmp_path}/j.npz:a", test=task.test)
  with pytest.raises(ValueError, match=r"no folder 'nowhere' .*; set TEST to yours"):
    Pixels(train=task.train, test="nowhere")
  with pytest.raises(ValueError, match=r"i.npz:a has 5 classes, .*i.npz:c only 2"):
    np.savez(tmp_path / "i.npz", **arrays, c_x=arrays["a_x"], c_y=np.arange(5) % 2, a_y=range(5))
    Pixels(train=f"{tmp_path}/i.npz:c", test=f"{tmp_path}/i.npz:a")
