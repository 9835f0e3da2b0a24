"""Preference tuning: the loss of pairs against float64, rows of pairs, and whole runs."""

import dataclasses
import functools
import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.test_loss import inputs
from train import trainer
from train.cluster import device_mesh
from train.config import ConfigError, Data
from train.data import IndexedDataset
from train.data.errors import DataError
from train.data.windows import Mixture, RandomCrops, TokenWindows
from train.runs import evaluation, reference
from train.runs.run_folder import RunFolder
from train.step.loss import next_token_nats
from train.step.preference import preference_loss

BETA, SMOOTHING = 0.7, 0.1
# Pairs of documents (0, 1), (2, 3), ..; the third document of the second row is padding, the chosen
# answer of the first row's second pair has no target, and those of the third row one token each.
SEGMENTS = np.array(
  [[0] * 3 + [1] * 4 + [2] * 2 + [3] * 5, [0] * 5 + [1] * 5 + [2] * 4, [*range(14)]]
)


def in_float64(hidden, head, targets, weights, ref):
  """(loss, margins, d hidden, d head): each pair after the other, each token after the other."""
  hidden, head = np.float64(hidden), np.float64(head)
  loss, margins = 0.0, []
  d_hidden, d_head = np.zeros_like(hidden), np.zeros_like(head)
  for b, segments in enumerate(SEGMENTS):
    for pair in range(segments.max() // 2 + 1):
      rewards, tokens = [0.0, 0.0], []
      for t in np.flatnonzero((segments // 2 == pair) & (weights[b] > 0)):
        logits = hidden[b, t] @ head
        p = np.exp(logits - logits.max())
        p /= p.sum()
        side, w = segments[t] % 2, float(weights[b, t])
        rewards[side] += BETA * (w * np.log(p[targets[b, t]]) + float(ref[b, t]))
        tokens.append((t, side, w * (np.eye(len(p))[targets[b, t]] - p)))  # and d log p / d logits
      if not tokens:
        continue
      u = rewards[0] - rewards[1]
      sigmoid = 1 / (1 + np.exp(-u))
      loss += -(1 - SMOOTHING) * np.log(sigmoid) - SMOOTHING * np.log(1 - sigmoid)
      slope = BETA * (sigmoid - (1 - SMOOTHING))
      margins.append(u)
      for t, side, d_logits in tokens:
        d_logits = (1 - 2 * side) * slope * d_logits
        d_hidden[b, t] += head @ d_logits
        d_head += np.outer(hidden[b, t], d_logits)
  return loss, margins, d_hidden, d_head


def test_preference_loss_and_gradients_match_float64():
  """Rafailov et al. 2023, equation 7, with the smoothing of label noise; what does not count may
  be NaN."""
  hidden, head, targets, weights = inputs(SEGMENTS.shape[1], dtype=np.float32)
  weights = np.float32(weights > 0)
  weights[1, SEGMENTS[1] == 2], weights[0, SEGMENTS[0] == 2], weights[2, :2] = 0, 0, 0
  hidden /= 2
  ref = np.random.default_rng(5).uniform(2, 9, weights.shape).astype(np.float32) * weights
  loss, margins, *gradients = in_float64(hidden, head, targets, weights, ref)
  hidden[weights == 0] = np.nan

  @jax.jit
  def found(hidden, head):
    def of(hidden, head):
      nats = next_token_nats(hidden, head, targets, weights, chunk=6)
      options = {"beta": BETA, "label_smoothing": SMOOTHING}
      sums = preference_loss(nats, ref, jnp.int32(SEGMENTS), weights, **options)
      return sums.nats, sums

    return jax.value_and_grad(of, (0, 1), has_aux=True)(hidden, head)

  (_, sums), got = found(hidden, head)
  count = len(margins)
  assert sums.weight == count == 9 and 0 < np.sum(np.array(margins) > 0) < count
  np.testing.assert_allclose(sums.nats, loss, rtol=1e-6)
  np.testing.assert_allclose(sums.measures["reward_margin"], sum(margins), rtol=1e-5)
  assert sums.measures["reward_accuracy"] == np.sum(np.array(margins) > 0)
  for x, want in zip(got, gradients, strict=True):
    np.testing.assert_allclose(x, want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_preference_loss_of_time_in_two_shards_is_that_of_all():
  """In equal parts of the sums, and in gradients; pairs of all sizes, also across the boundary."""
  rng = np.random.default_rng(0)
  nats, ref = rng.uniform(2, 9, (2, *SEGMENTS.shape)).astype(np.float32)
  arrays = ref, np.int32(SEGMENTS), np.ones_like(nats)
  loss = functools.partial(preference_loss, beta=BETA, label_smoothing=SMOOTHING)
  in_two = lambda x: x.reshape(len(x), 2, -1).swapaxes(0, 1)
  shards = jax.vmap(functools.partial(loss, axis_name="time"), axis_name="time")

  @jax.jit
  def found(nats):
    parts = lambda nats: shards(*map(in_two, (nats, *arrays)))
    whole = lambda nats: loss(nats, *arrays)
    total = lambda of: lambda nats: ((sums := of(nats)).nats.sum(), sums)
    both = [jax.value_and_grad(total(of), has_aux=True)(nats) for of in (parts, whole)]
    return *both, loss(ref, *arrays)

  ((_, parts), got), ((_, whole), want), first = found(nats)
  for part, sums in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
    np.testing.assert_allclose(part, [sums / 2] * 2, rtol=1e-6)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
  assert first.measures["reward_accuracy"] == 0  # of the model before the first step
  np.testing.assert_allclose(first.nats, first.weight * np.log(2), rtol=1e-6)


@pytest.fixture
def pairs(tiny, tmp_path):
  """Returns a function that makes the config of a run on pairs: "a" is preferred to "b"."""
  row = lambda n: {"q": f"{n}: " + "xy"[n % 2] * 6, "good": "a" * 5, "bad": "b" * 3}
  for name, count in (("train", 24), ("validation", 6)):
    rows = map(row, range(count))
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

  def make(**changes):
    names = ("train", "validation")
    options = {
      "data__folder": str(tmp_path / "tokens"),
      "data__fields": dict.fromkeys(names, ("q", "good", "bad")),
      "data__sources": {name: str(tmp_path / f"{name}.jsonl") for name in names},
      "optimizer__logit_penalty": 0.0,
      "seq_len": 80,  # two pairs
    }
    return tiny(**options | changes)

  return make


def test_windows_hold_whole_pairs(pairs, tmp_path):
  cfg = pairs(seq_len=64)
  trainer.prepare(cfg.data)
  dataset = IndexedDataset(f"{cfg.data.folder}/train")
  assert dataset.num_documents == 48 and cfg.data.has_pairs
  windows, seen = trainer.training_set(cfg), []
  windows.reference = np.arange(len(windows) * 64, dtype=np.float32).reshape(-1, 64)
  for number, window in enumerate(windows):
    np.testing.assert_array_equal(window["reference"], windows.reference[number])
    segments, counts = window["segment_ids"], window["weights"] > 0
    of = range(segments[counts].max() + 1)
    answers = [bytes((window["targets"][(segments == n) & counts] % 256).tolist()) for n in of]
    assert answers == [b"aaaaa\0", b"bbb\0"] * (len(of) // 2)
    prompts = [window["tokens"][segments == n][:9].tolist() for n in of]
    assert prompts[::2] == prompts[1::2]
    seen += [bytes(x) for x in prompts[::2]]
  assert len(set(seen)) == len(seen) == 24 > len(windows)
  with pytest.raises(DataError, match=r"24 of 24 rows have .* both answers together, the longest"):
    trainer.training_set(dataclasses.replace(cfg, seq_len=20))
  with pytest.raises(DataError, match=r"has 3 documents, but rows of 2 each"):
    (tmp_path / "odd.jsonl").write_text('{"text": "aa"}\n' * 3)
    odd = Data(**vars(cfg.data) | {"train": ("odd",), "validation": (), "fields": {}} |
               {"sources": {"odd": str(tmp_path / "odd.jsonl")}})  # fmt: skip
    trainer.prepare(odd)
    TokenWindows(f"{cfg.data.folder}/odd", 64, 257, whole=[2])


def test_references_of_all_sets_are_those_of_their_windows_and_are_found_again(
  pairs, tmp_path, monkeypatch
):
  """Also where the last batch is not full, and in a mixture of sets."""
  cfg = pairs(seq_len=64, global_batch=4)
  trainer.prepare(cfg.data)
  step, mesh = lambda params, batch: params * batch["targets"], device_mesh.make_mesh(cfg)
  monkeypatch.setattr(reference, "make_reference_step", lambda *_: step)
  monkeypatch.setattr(reference.compile_cache, "found_by_trace", lambda step, *_: step)

  def opened():
    windows = trainer.training_set(cfg), evaluation.open_sets(cfg)["validation"]
    sets = Mixture(dict(zip("ab", windows, strict=True)), {"a": 1, "b": 1})
    found = reference.pairs_of([sets, RandomCrops(windows[0], 0), 3])
    assert [*map(len, found)] == [len(windows[n]) for n in (0, 1, 0)]
    return found[:2]

  first = opened()
  how = cfg, None, mesh, np.float32(0.5), first, tmp_path, None, lambda line: None
  reference.compute(*how)
  again = opened()
  reference.load(again, tmp_path)
  assert any(len(source) % cfg.global_batch for source in first)
  for source in (*first, *again):
    want = [0.5 * window["targets"] for window in source]
    np.testing.assert_array_equal(source.reference, want)
  with pytest.raises(DataError, match="gives tokens a probability of 0 or none"):
    reference.compute(*how[:3], np.float32(np.nan), *how[4:])


def test_reference_with_a_flipped_bit_is_an_error_or_the_same(tmp_path):
  """In the headers of its archive: such as a method of compression, or a password."""
  windows = type(
    "Windows", (), {"__len__": lambda self: 3, "fingerprint": "f" * 16, "seq_len": 5}
  )()
  file, want = tmp_path / reference.FILE, np.arange(15, dtype=np.float32).reshape(3, 5)
  np.savez(file, **{windows.fingerprint: want})
  content, errors = file.read_bytes(), 0
  begin = content.index(b"\x93NUMPY")
  end = begin + content[begin:].index(b"PK")
  for place in (*range(begin), *range(end, len(content))):
    for bit in range(8):
      changed = bytearray(content)
      changed[place] ^= 1 << bit
      file.write_bytes(changed)
      try:
        reference.load([windows], tmp_path)
        assert windows.reference.tobytes() == want.tobytes()
      except DataError as error:
        errors += str(error).startswith(f"{file} has ")
  assert errors > 300


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"bad": ""}, 'line 24: "bad" is empty, but a pair has two answers'),
    ({"bad": 1}, 'line 24: "bad" is int, expected a string'),
    (None, "line 24: found the keys .* expected an object with the key"),
  ],
)
def test_wrong_row_of_a_pair_is_an_error_before_anything_is_compiled(pairs, change, message):
  cfg = pairs()
  path = Path(cfg.data.sources["train"])
  *rows, last = path.read_text().splitlines()
  last = json.dumps(json.loads(last) | change if change else {"q": "?"})
  path.write_text("\n".join([*rows, last]))
  with pytest.raises(DataError, match=message) as error:
    trainer.fit(cfg)
  assert "\n" not in str(error.value)


def test_settings_that_pairs_do_not_go_with_are_errors(pairs):
  fields = pairs().data.fields
  for changes, message in (
    ({"data__fields": {"train": ("q", "good")}, "data__targets": {"train": "last"}}, None),
    ({"data__targets": {"train": "last"}}, "'last' does not go with the two answers"),
    ({"data__weighting": "documents"}, "has no loss of pairs, which are in train, validation"),
    ({"optimizer__z_loss": 1e-4}, "optimizer.z_loss=0.0001 .* no part of the loss of pairs"),
    ({"data__train": ("train", "validation"), "data__validation": (),
      "data__fields": {"train": fields["train"]}}, "has pairs of answers in train only"),
    ({"preference__beta": 0.0}, "preference.beta=0.0 must be positive"),
    ({"preference__label_smoothing": 0.5}, r"must be in \[0, 0.5\)"),
    ({"data__fields": {"train": tuple("abcd")}}, "those of a prompt, the chosen answer"),
  ):  # fmt: skip
    if message is None:
      assert not pairs(**changes).data.has_pairs
      continue
    with pytest.raises(ConfigError, match=message):
      pairs(**changes)


@pytest.mark.slow
def test_run_on_pairs_learns_the_preference_against_its_first_model(pairs):
  cfg = pairs(steps=8, log_every=1, eval_every=8, checkpoint_every=8)
  trainer.fit(cfg)
  rows = RunFolder(cfg.run_dir).read_rows()
  first, *_, last = (row for row in rows if row["kind"] == "train")
  assert first["loss"] == pytest.approx(np.log(2), rel=1e-6)
  assert abs(first["reward_margin"]) < 1e-5 and first["bits_per_byte"] is None
  assert last["reward_margin"] > 0.1 and last["reward_accuracy"] == 1
  begin, end = (row for row in rows if row["kind"] == "eval")
  assert begin["val_loss"] == pytest.approx(np.log(2), rel=1e-6) and begin["pairs"] == 6
  assert end["val_loss"] < 0.65 and "tokens" not in end
  (again,) = evaluation.run(cfg)
  assert again == end


@pytest.mark.slow
def test_killed_run_on_pairs_resumes_bit_exact_with_its_first_model(pairs, tmp_path, fit_and_kill):
  lora = {"optimizer__lora_rank": 2, "optimizer__lora_names": ("*.kernel",)}
  options = {"optimizer__peak_lr": 3e-2, "data__pack_rows": False, **lora}
  whole = pairs(run_dir=str(tmp_path / "whole"), **options)
  want = trainer.fit(whole)
  parts = pairs(**options)
  fit_and_kill(parts, at=8)
  file = RunFolder(parts.run_dir).path / reference.FILE
  content = file.read_bytes()
  for damaged in (content[:-9], content.replace(b"\0\0\x80?", b"\0\0\x81?"), b"x", None):
    file.unlink() if damaged is None else file.write_bytes(damaged)
    if damaged == content:
      continue
    with pytest.raises(DataError, match=r"reference.npz has the log-probabilities"):
      trainer.fit(parts)
  file.write_bytes(content)
  with pytest.raises(DataError, match="are not those with which the run began"):
    other = dataclasses.replace(parts, seq_len=96)
    trainer.fit(other, allow_config_change=True)
  result = trainer.fit(parts)
  chex.assert_trees_all_equal(result.state, want.state, strict=True)
  assert result.validation == want.validation
