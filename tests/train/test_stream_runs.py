"""Runs with `data.stream`: text that is encoded while it is read, resumed exactly."""

import inspect
import json
import sys
import types
from pathlib import Path

import chex
import pytest

from tests.train.test_labeled_runs import losses
from train import trainer
from train.cluster import device_mesh
from train.cluster.stop_signal import StopSignal
from train.config import ConfigError, to_dict
from train.data.errors import DataError
from train.data.streams import Stream
from train.loop import Callback, Moment, train


@pytest.mark.slow
def test_killed_run_on_a_stream_resumes_bit_exact(
  tiny, tmp_path, fit_and_kill, monkeypatch, capsys
):
  """Of a file, as an unbroken one of the generator of its rows; there are no token files."""
  cfg = tiny(data__stream=True, data__folder=str(tmp_path / "tokens"))
  lines = Path(cfg.data.sources["train"]).read_text().splitlines()
  module = types.SimpleNamespace(rows=lambda: map(json.loads, lines))
  monkeypatch.setitem(sys.modules, "rows_of_a_test", module)
  data = to_dict(cfg)["data"] | {"sources": cfg.data.sources | {"train": "rows_of_a_test:rows"}}
  unbroken = tiny(data=data, run_dir=str(tmp_path / "whole"))
  whole = trainer.fit(unbroken)
  out = capsys.readouterr().out
  assert "data        rows_of_a_test:rows, as it is read: 1.54k tokens in 12 steps" in out
  fit_and_kill(cfg, at=8)  # the newest checkpoint is of step 5
  result = trainer.fit(cfg)
  chex.assert_trees_all_equal(result.state, whole.state, strict=True)
  assert losses(cfg) == losses(unbroken) and len(losses(cfg)) == 12
  assert result.validation == whole.validation
  assert {path.stem for path in (tmp_path / "tokens").glob("*.bin")} == {"validation"}


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"train": ("train", "validation"), "validation": ()}, "name one set"),
    ({"sources": {}}, "no data.sources of the training set"),
    ({"validation": ("validation", "train")}, "its set in data.validation"),
    ({"targets": {"train": "last"}}, "rows with prompts or targets"),
    ({"order": "random_crops"}, "data.order='random_crops'"),
    ({"tokenizer": "bpe:300"}, "data.tokenizer='bpe:300'"),
  ],
)
def test_setting_that_a_stream_cannot_have_is_named(tiny, changes, message):
  with pytest.raises(ConfigError, match=f"data.stream=True cannot be used with .*{message}"):
    tiny(**{f"data__{name}": value for name, value in changes.items()}, data__stream=True)


def test_stream_of_a_run_is_read_by_its_settings(tiny, monkeypatch):
  given = {}

  def told(*arguments, **options):
    given.update(inspect.signature(Stream).bind(*arguments, **options).arguments)

  monkeypatch.setattr(trainer, "Stream", told)
  wanted = {"boundaries": "ignore", "special_tokens": "parse"}
  changes = {f"data__{name}": value for name, value in wanted.items()}
  fields = {"train": ("body",)}
  cfg = tiny(data__stream=True, seed=7, data__fields=fields, **changes)
  trainer._stream(cfg)
  wanted |= {"key": "body", "seed": 7, "seq_len": cfg.seq_len, "vocab_size": cfg.model.vocab_size}
  assert given | wanted == given and given["source"] == cfg.data.sources["train"]


def test_source_of_a_stream_is_opened_before_anything_is_compiled(tiny, monkeypatch):
  monkeypatch.setattr(trainer, "compile_step", None)
  cfg = tiny(data__stream=True)
  sources = cfg.data.sources | {"train": "no_such_module:rows"}
  with pytest.raises(DataError, match=r"'no_such_module:rows', which cannot be used: .*No mod"):
    trainer.fit(tiny(data__stream=True, data__sources=sources))
  with pytest.raises(DataError, match="is for single runs of `fit`"):
    trainer.training_set(cfg)


def test_run_that_is_told_to_stop_tells_its_stream_and_ends_without_a_batch(tiny, monkeypatch):
  cfg, given, called, stop = tiny(data__stream=True), {}, [], StopSignal()
  monkeypatch.setattr(trainer, "StreamBatches", lambda *_, **options: given.update(options))
  trainer._batches(trainer._stream(cfg), cfg, device_mesh.make_mesh(cfg), 0, None, stop)
  assert not given["stop"]()
  stop.name = "SIGTERM"
  assert given["stop"]()
  moment = Moment(0, None, [Callback()])
  monkeypatch.setattr(moment, "call", called.append)
  train(moment, None, iter(()), steps=3)
  assert called == ["started", "before_step", "ended"]
