"""benchmarks.model_step: what it sets, what it rejects, and a small run."""

import dataclasses
import time

import pytest

from benchmarks import generation, model_peers, model_step
from train.config import Model

TINY = model_step.Sizes.parse(
  "rows=2,length=16,dim=16,num_layers=2,channel_hidden=16,vocab_size=300,loss_chunk=16"
)


def test_model_step_bodies_leave_all_but_their_sizes_at_the_defaults():
  sizes = {"mixer", "mixer_options", "num_heads", "dim", "num_layers", "vocab_size"}
  shape = {"channel_mixer", "channel_hidden", "norm", "embedding_norm"}
  plain = Model(dim=8, num_layers=1, num_heads=1, vocab_size=9)
  for body in model_step.BODIES.values():
    model = model_step.settings(body).model
    for field in dataclasses.fields(Model):
      if field.name not in sizes | shape:
        assert getattr(model, field.name) == getattr(plain, field.name), field.name


def test_model_step_peers_are_bodies_of_ours():
  assert set(model_peers.MODELS) <= set(model_step.BODIES)
  assert not list(model_peers.measure("lnssm"))
  assert not list(model_peers.generation("lnssm", [1], 8, 1))


@pytest.mark.slow
def test_model_step_small_run_has_every_column(monkeypatch):
  body = model_step.BODIES["gla"]._replace(num_heads=2)
  row = model_step.measure(body, TINY, time.time(), steps=1, runs=1)
  assert row["step_ms"] > 0 and row["parameters"] > 0
  assert len(row["losses"]) == 3
  monkeypatch.setattr(model_step, "LOSS_TOLERANCE", -1.0)
  with pytest.raises(FloatingPointError, match="a wrong result has no time"):
    model_step.measure(body, TINY, time.time(), steps=1, runs=1)


@pytest.mark.slow
def test_generation_of_a_body_has_both_times_after_the_logits_are_compared(monkeypatch):
  sizes = "dim=16,num_layers=2,channel_hidden=16,vocab_size=300"
  options = ["--prompt", "20", "--new", "4", "--batches", "2", "--no-peers"]
  (row,) = generation.main(["--body", "retnet", "--sizes", sizes, *options])
  assert row["prefill_ms"] > 0 and row["decode_ms"] > 0 and row["batch"] == 2
  monkeypatch.setattr(generation, "LOGIT_TOLERANCE", 0.0)
  rows = generation.main(["--body", "retnet", "gla", "--sizes", sizes, *options])
  assert [row["body"] for row in rows] == ["retnet", "gla"]
  assert all("a wrong result has no time" in row["note"] for row in rows)
