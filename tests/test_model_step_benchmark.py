"""benchmarks.model_step: what it sets, what it rejects, and a small run."""

import dataclasses
import json
import sys
import time
import tomllib
from unittest import mock

import jax
import pytest

from benchmarks import generation, model_jla, model_peers, model_step, turns
from train.config import Model

TINY = model_step.Sizes.parse(
  "rows=2,length=16,dim=16,num_layers=2,channel_hidden=16,vocab_size=300,loss_chunk=16"
)


def test_model_step_bodies_leave_all_but_their_sizes_at_the_defaults():
  sizes = {"mixer", "mixer_options", "num_heads", "dim", "num_layers", "vocab_size"}
  shape = {"channel_mixer", "channel_hidden", "norm", "embedding_norm", "channel_mixer_options"}
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


def test_model_step_peers_have_their_sizes(monkeypatch):
  """With stand-ins for torch and fla: an option of a model replaces the common size."""
  made = {}

  class Names:
    def __getattr__(self, name):
      def make(*args, **options):
        made[name] = options
        return mock.MagicMock()

      return make

  torch, fla = mock.MagicMock(), mock.MagicMock(models=Names())
  monkeypatch.setitem(sys.modules, "torch", torch)
  monkeypatch.setitem(sys.modules, "fla", fla)
  monkeypatch.setitem(sys.modules, "fla.models", fla.models)
  for body, (name, options) in model_peers.MODELS.items():
    model_peers._model(body)
    assert made[f"{name}Config"].items() >= options.items()
    assert made[f"{name}Config"]["num_hidden_layers"] == 24


def test_model_step_rival_has_the_sizes_of_ours():
  assert set(model_jla.MODELS) <= set(model_step.BODIES)
  assert not list(model_jla.measure("lnssm", documents=True))
  sizes = model_step.Sizes()
  for body in model_jla.MODELS:
    for documents in (True, False):
      config = tomllib.loads(model_jla.configuration(body, documents=documents))
      model, train = config["model"], config["train"]
      assert (train["micro_batch_per_replica"], train["seq_len"]) == (sizes.rows, sizes.length)
      assert (model["d_model"], model["n_layers"]) == (sizes.dim, sizes.num_layers)
      assert (model["d_ff"], model["vocab_size"]) == (sizes.channel_hidden, sizes.vocab_size)
      assert len(model.get("layer_types", [""] * sizes.num_layers)) == sizes.num_layers
      assert config["data"].get("document_masking", False) == documents


def test_model_step_rival_with_a_wrong_result_has_no_time(tmp_path):
  log = {"skipped_steps": 0.0, "loss": 3.0}
  logs = [log | {"step_time": seconds} for seconds in (9.0, 9.0, 0.1, 0.3, 0.2)]
  (tmp_path / "run.json").write_text('{"parameters": 7}')
  (tmp_path / "compile_preflight.json").write_text('{"memory": {"total_size_gib": 40.04}}')

  def results(logs):
    lines = [{"event": "end"}, *({"event": "train", "metrics": log} for log in logs)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return model_jla.results(tmp_path)

  row = results(logs)
  assert (row["step_ms"], row["tokens_per_second"]) == (200.0, 163840)
  assert (row["peak_gib"], row["parameters"]) == (40.0, 7)
  for wrong in ({"loss": "nan"}, {"skipped_steps": 1.0}):
    with pytest.raises(FloatingPointError, match="a wrong result has no time"):
      results([*logs, logs[0] | wrong])


@pytest.mark.slow
def test_model_step_small_run_has_every_column(monkeypatch):
  body = model_step.BODIES["gla"]._replace(num_heads=2)
  row = model_step.measure(body, TINY, time.time(), steps=1, runs=1)
  assert row["step_ms"] > 0 and row["parameters"] > 0
  assert len(row["losses"]) == 3
  monkeypatch.setattr(model_step, "LOSS_TOLERANCE", -1.0)
  with pytest.raises(FloatingPointError, match="a wrong result has no time"):
    model_step.measure(body, TINY, time.time(), steps=1, runs=1)


def test_generation_prints_own_rows_first_and_tunes_a_peer_before_it_is_timed(monkeypatch):
  ran = []

  def take(commands):
    for command in commands:
      ran.append(command[command.index("--body") :])
      yield {"decode_ms": 1.0} if "2" in ran[-1] else {"note": "out of memory"}

  def alone(command, longest):
    assert longest == model_peers.LONGEST
    ran.append(command[command.index("benchmarks.model_peers") + 1 :])
    return {"tune_s": 99.0} if "tune" in command else {"who": "fla", "decode_ms": 2.0}

  monkeypatch.setattr(turns, "take", take)
  monkeypatch.setattr(turns, "alone", alone)
  monkeypatch.setattr(model_peers, "missing", lambda: None)
  options = ["--together", "--batches", "1", "2", "--prompt", "64", "--new", "32"]
  rows = generation.main(["--body", "gla", "mamba2", *options])
  assert [(row["body"], row["who"], row["batch"]) for row in rows] == [
    *(("gla", "lnssm_jax", 1), ("gla", "lnssm_jax", 2)),
    *(("mamba2", "lnssm_jax", 1), ("mamba2", "lnssm_jax", 2)),
    *(("gla", "fla tune", 1), ("gla", "fla", 1), ("gla", "fla tune", 2), ("gla", "fla", 2)),
  ]
  assert rows[0]["note"] == "out of memory" and rows[1]["decode_ms"] == 1.0
  assert all(command[-1] == "--in-turn" and "--no-peers" in command for command in ran[:4])
  assert ran[4:6] == [["gla", "generate", "1", "64", "32", *mode] for mode in (["tune"], [])]
  ran.clear()
  generation.main(["--body", "gla", *options, "--no-tune", "--no-own"])
  assert [command[-1] for command in ran] == ["32", "32"]


@pytest.mark.slow
def test_generation_compiles_nothing_after_it_waited():
  programs, when_waiting, compiled = [], [], "/jax/core/compile/backend_compile_duration"
  note = lambda event, seconds, **_: programs.append(event)
  model = model_step.settings(model_step.BODIES["retnet"], TINY).model
  jax.monitoring.register_event_duration_secs_listener(note)
  try:
    wait = lambda: when_waiting.append(programs.count(compiled))
    generation.phases(model, 2, 20, 4, 8, wait)
  finally:
    jax.monitoring.unregister_event_duration_listener(note)
  (before,) = when_waiting
  assert before > 2 and programs.count(compiled) == before


@pytest.mark.slow
def test_generation_together_has_a_row_of_each_body_and_batch():
  sizes = "dim=16,num_layers=2,channel_hidden=16,vocab_size=300"
  options = ["--prompt", "20", "--new", "4", "--batches", "1", "2", "--no-peers", "--together"]
  rows = generation.main(["--body", "retnet", "--sizes", sizes, *options])
  assert [(row["batch"], row["prefill_chunk"]) for row in rows] == [(1, 2048), (2, 2048)]
  assert all(row["prefill_ms"] > 0 and row["decode_ms"] > 0 for row in rows)


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
