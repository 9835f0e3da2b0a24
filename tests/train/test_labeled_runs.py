"""Runs on mixtures with labels: resumed exactly, the same for any number of processes."""

import contextlib
import json
import random
from unittest import mock

import chex
import jax
import numpy as np
import pytest

from tests.train.conftest import WORDS
from train import trainer
from train.cluster.device_mesh import batch_sharding, make_mesh
from train.data import IndexedDataset
from train.runs.run_folder import RunFolder, RunFolderError


@pytest.fixture
def mixed(tiny, text_folder, tmp_path):
  """Returns a function that makes the config of a run on text and on prompts with completions."""
  rng = random.Random(1)
  for name, count in (("chat", 40), ("chat_validation", 8)):
    rows = [
      {"q": " ".join(rng.choices(WORDS, k=9)), "a": f" {rng.choice(WORDS)}"} for _ in range(count)
    ]
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

  def make(**changes):
    chats = ("chat", "chat_validation")
    options = {
      "seq_len": 96,  # no row is longer
      "data__folder": str(tmp_path / "tokens"),
      "data__train": {"train": 2, "chat": 1},
      "data__validation": ("validation", "chat_validation"),
      "data__fields": dict.fromkeys(chats, ("q", "a")),
      "data__sources": {
        **{name: str(text_folder / f"{name}.jsonl") for name in ("train", "validation")},
        **{name: str(tmp_path / f"{name}.jsonl") for name in chats},
      },
    }
    return tiny(**options | changes)

  return make


def losses(cfg):
  rows = RunFolder(cfg.run_dir).read_rows()
  return {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}


def test_killed_run_on_a_mixture_resumes_bit_exact(mixed, tmp_path, fit_and_kill, capsys):
  whole = mixed(run_dir=str(tmp_path / "whole"))
  reference = trainer.fit(whole)
  out = capsys.readouterr().out
  assert "data        train, 66.7% of the rows: " in out and "data        chat, 33.3%" in out
  parts = mixed()
  fit_and_kill(parts, at=8)  # the newest checkpoint is of step 5
  result = trainer.fit(parts)
  chex.assert_trees_all_equal(result.state, reference.state, strict=True)
  assert losses(parts) == losses(whole) and len(losses(whole)) == 12
  assert result.validation == reference.validation
  text, chat = result.validation
  assert text["bits_per_byte"] is not None and chat["bits_per_byte"] is None
  pair = IndexedDataset(f"{whole.data.folder}/chat_validation")
  targets = np.delete(pair.weights[:], pair.document_starts)
  assert chat["tokens"] == targets.sum() < pair.num_tokens / 2  # of all rows
  with pytest.raises(RunFolderError, match=r"data\.train\.chat: the folder's run has 1.0, this"):
    trainer.fit(mixed(data__train={"train": 2, "chat": 3}))


def test_batches_of_a_mixture_do_not_depend_on_processes(mixed):
  """The rows of two processes, one after the other, are those of one process."""
  cfg = mixed()
  trainer.prepare(cfg.data)
  windows, mesh = trainer.training_set(cfg), make_mesh(cfg)
  pair = IndexedDataset(f"{cfg.data.folder}/chat")
  answers = sum(window["weights"].sum() for window in windows.sets["chat"])
  assert answers == np.delete(pair.weights[:], pair.document_starts).sum()  # no row is cut
  assert batch_sharding(mesh) is not None

  def read(rows):
    with (
      mock.patch.object(trainer.distributed, "local_rows", lambda *_: rows),
      mock.patch.object(trainer.distributed, "to_devices", lambda batch, *_: batch),
      contextlib.closing(trainer._batches(windows, cfg, mesh, 3, None, None)) as batches,
    ):
      feed = trainer._feed(batches, cfg, mesh)
      return [next(feed) for _ in range(5)]

  first, second, whole = read(range(2)), read(range(2, 4)), read(range(4))
  both = jax.tree.map(lambda *parts: np.concatenate(parts), first, second)
  chex.assert_trees_all_equal(both, whole, strict=True)
