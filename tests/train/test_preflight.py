"""Checks of data, tokenizer, model and memory before a run spends time."""

import dataclasses
import json
import types
from pathlib import Path

import pytest

from train import trainer
from train.cli.main import main
from train.cluster.device_mesh import make_mesh
from train.config import ConfigError, apply_overrides
from train.data import DataError, preflight
from train.data.tokenize import prepare
from train.data.tokenizers import train_bpe
from train.step import memory

TEXT = "the quick river moves over the stone under the bright night"


@pytest.fixture
def no_work(monkeypatch):
  """Neither tokenizing nor compiling."""

  def fail(*_, **__):
    raise AssertionError("time was spent before the check")

  monkeypatch.setattr(trainer, "prepare", fail)
  monkeypatch.setattr(trainer, "compile_step", fail)
  monkeypatch.setattr("train.cli.dry_run.compile_step", fail)


@pytest.fixture
def rejected(tiny, config_file, capsys, no_work):
  """Returns a function that gives the error of `fit`, the same as that of its --dry-run."""

  def run(**changes) -> str:
    cfg = tiny(**changes)
    with pytest.raises(ValueError) as caught:
      trainer.fit(cfg)
    assert main(["fit", "--config", config_file(cfg), "--dry-run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: {caught.value}"
    return str(caught.value)

  return run


def test_tokenizer_larger_than_the_vocabulary_rejected_before_tokenizing(rejected, tmp_path):
  train_bpe("bpe:262", tmp_path, [TEXT])
  folder, path = tmp_path / "tokens", str(tmp_path / "tokenizer.json")
  line = rejected(data__tokenizer=path, data__folder=str(folder))
  assert f"data.tokenizer={path!r} has 262 entries, more than model.vocab_size=257" in line
  assert not folder.exists()


def test_set_without_one_window_rejected_before_tokenizing(rejected, tmp_path):
  (tmp_path / "a.txt").write_text(TEXT)
  line = rejected(
    data__folder=str(tmp_path / "tokens"),
    data__sources__validation=str(tmp_path / "a.txt"),
    seq_len=64,
  )
  assert line.startswith(
    f"the set 'validation' has at most {len(TEXT) + 1} tokens, by the size of its text, but one"
    " window of seq_len=64 needs 65; use a smaller seq_len"
  )


def test_token_files_without_one_window_rejected(rejected, tiny, tmp_path):
  (tmp_path / "a.txt").write_text(TEXT)
  changes = {"data__folder": str(tmp_path / "tokens"), "data__sources": {}}
  cfg = tiny(**changes | {"data__sources": dict.fromkeys(("train", "validation"), str(tmp_path))})
  prepare(cfg.data)
  line = rejected(**changes, seq_len=64)
  assert f"train.bin has {len(TEXT) + 1} tokens, but one window of seq_len=64 needs 65" in line


def test_token_files_of_another_config_rejected(rejected, tiny, tmp_path):
  (tmp_path / "a.txt").write_text(TEXT)
  (tmp_path / "b.txt").write_text(TEXT)
  sets = lambda name: dict.fromkeys(("train", "validation"), str(tmp_path / name))
  changes = {"data__folder": str(tmp_path / "tokens")}
  prepare(tiny(**changes, data__sources=sets("a.txt")).data)
  line = rejected(**changes, data__sources=sets("b.txt"))
  assert "train.bin was created with source=" in line and "another data.folder" in line


def test_short_set_found_before_a_long_one_is_tokenized(tiny, tmp_path):
  """Text whose number of tokens only a tokenizer of another kind tells."""
  train_bpe("bpe:262", tmp_path, [TEXT])
  (tmp_path / "a.txt").write_text(TEXT)
  cfg = tiny(
    data__tokenizer=str(tmp_path / "tokenizer.json"),
    data__folder=str(tmp_path / "tokens"),
    data__sources__validation=str(tmp_path / "a.txt"),
    model__vocab_size=262,
    seq_len=56,
  )
  assert preflight.missing(cfg) == []
  with pytest.raises(
    DataError, match=r"validation.bin has \d+ tokens, but one window of seq_len=56"
  ):
    prepare(cfg.data, least=preflight.windowed(cfg))
  assert not list((tmp_path / "tokens").glob("train*"))


def test_documents_scored_alone_need_no_window(tiny, tmp_path):
  (tmp_path / "a.txt").write_text("ab")
  changes = {"data__folder": str(tmp_path), "data__sources__validation": str(tmp_path / "a.txt")}
  with pytest.raises(DataError, match="the set 'validation' has at most 3 tokens"):
    preflight.require(tiny(**changes))
  preflight.require(tiny(**changes, data__weighting="documents"))


def test_dry_run_says_what_is_not_here_and_fit_rejects_it(tiny, tmp_path, no_work):
  cfg = tiny(
    data__folder=str(tmp_path / "tokens"),
    data__tokenizer=str(tmp_path / "none.json"),
    data__sources__train=str(tmp_path / "none.txt"),
  )
  tokenizer, text = preflight.missing(cfg)
  assert "there is no tokenizer" in tokenizer and "none.json" in tokenizer
  assert "there is no file or folder" in text and "none.txt" in text
  with pytest.raises(DataError, match=r"there is no tokenizer .* None is downloaded"):
    trainer.fit(cfg)


def devices(mesh, limit):
  """A mesh whose devices have `limit` bytes of memory."""
  stats = {"bytes_limit": limit} if limit else None
  one = types.SimpleNamespace(memory_stats=lambda: stats)
  return types.SimpleNamespace(shape=mesh.shape, local_devices=[one])


def test_memory_of_the_step_compared_with_the_device(tiny):
  cfg, said = tiny(global_batch=8), []
  mesh = make_mesh(cfg)
  sizes = {"arguments": 600 << 20, "temporary": 400 << 20}

  def check(limit, **changes):
    return memory.check(
      sizes, devices(mesh, limit), dataclasses.replace(cfg, **changes), said.append
    )

  check(None)  # a CPU
  check(2000 << 20)
  assert said == []
  check(1050 << 20)
  (line,) = said
  assert "needs 0.98 GiB per device of 1.03 GiB available" in line
  message = (
    "needs 0.98 GiB per device of 0.88 GiB available; use model.remat=full, a larger accumulate"
    r" \(now 1: 8 sequences per device at once\), a smaller global_batch"
  )
  with pytest.raises(ValueError, match=message):
    check(900 << 20)
  model = dataclasses.replace(cfg.model, remat="full")
  with pytest.raises(
    ValueError, match=r"0.88 GiB available; use a smaller seq_len than 32, or more"
  ):
    check(900 << 20, model=model, accumulate=8)


def test_run_that_needs_more_memory_than_the_device_stops_before_tokenizing(
  tiny, monkeypatch, tmp_path, capsys
):
  cfg = tiny(data__folder=str(tmp_path / "tokens"))
  plan = types.SimpleNamespace(
    argument_size_in_bytes=3 << 20,
    output_size_in_bytes=2 << 20,
    alias_size_in_bytes=2 << 20,
    temp_size_in_bytes=4 << 20,
    generated_code_size_in_bytes=0,
  )
  compiled = types.SimpleNamespace(memory_analysis=lambda: plan)
  monkeypatch.setattr(trainer, "compile_step", lambda *_: compiled)
  monkeypatch.setattr(memory, "available", lambda mesh: 6 << 20)
  with pytest.raises(ValueError, match=r"the training step needs 7.00 MiB per device of 6.00 MiB"):
    trainer.fit(cfg)
  assert not Path(cfg.data.folder).exists()
  expected = "memory      7.00 MiB per device: arguments 3.00 MiB, temporary 4.00 MiB"
  assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
  ("assignment", "message"),
  [
    ("model.mixer=lrm", "mixer='lrm' is unknown; did you mean 'lrn'"),
    ("model.mixer_options.foo=3", "mixer_options of 'lrn': option='foo' is unknown"),
    ("model.channel_mixer=foo", "channel_mixer='foo' is unknown"),
    ("model.channel_mixer_options.foo=3", "channel_mixer_options of 'gpt2': option='foo'"),
  ],
)
@pytest.mark.parametrize("how", ["--print-config", "--dry-run", None])
def test_unknown_mixer_or_option_rejected(
  assignment, message, how, tiny, config_file, capsys, no_work
):
  cfg = tiny(model__channel_mixer="gpt2")
  arguments = ["fit", "--config", config_file(cfg), "--set", assignment]
  assert main([*arguments, how] if how else arguments) == 2
  assert message in capsys.readouterr().err


def test_sequences_longer_than_attention_holds_rejected(rejected):
  """Else the outputs of documents that are longer, and so the losses, are NaN."""
  error = rejected(model__mixer=("lrn", "softmax_attention"), model__num_layers=2, seq_len=2080)
  assert error == (
    "seq_len=2080 is more than model.mixer_options.softmax_attention.max_length=2048; use a "
    "smaller one, or --set model.mixer_options.softmax_attention.max_length=2080."
  )


@pytest.mark.parametrize(
  ("assignment", "answer"),
  [
    ("lr=1", "'optimizer.peak_lr'"),
    ("optimizer.lr=1", "'optimizer.peak_lr'"),
    ("eval_batches=3", "'eval_tokens'"),
    ("data.streaming=1", "'data.stream'"),
    ("data.weights=1", "'data.train'"),
    ("data.text_key=a", "'data.fields'"),
  ],
)
def test_setting_of_another_library_answered(assignment, answer, tiny):
  with pytest.raises(ConfigError, match=f"here it is {answer}"):
    apply_overrides(tiny(), [assignment])


@pytest.mark.parametrize(
  ("row", "message"),
  [
    ({"prompt": "a", "completion": "b" * 99}, "rows are not cut"),
    ({"prompt": "a"}, 'line 2: found the keys .* expected an object with the key "completion"'),
    ({"messages": []}, "line 1: found the keys .*Conversations need data.targets: assistant"),
  ],
)
def test_wrong_row_of_prompts_is_found_before_anything_is_compiled(
  row, message, tiny, tmp_path, monkeypatch
):
  compiled = []
  monkeypatch.setattr(trainer, "compile_step", lambda *_: compiled.append(1))
  rows = [{"prompt": "a", "completion": "b"}, row]
  fields = ("prompt", "completion")
  if "messages" in row:  # in place of texts, of which the first row is read
    rows, fields = [row] * 200, ("text",)
  (tmp_path / "rows.jsonl").write_text("".join(json.dumps(x) + "\n" for x in rows))
  data = {"train": ("rows",), "validation": (), "sources": {"rows": str(tmp_path / "rows.jsonl")}}
  data |= {"fields": {"rows": fields}, "folder": str(tmp_path / "data")}
  cfg = tiny()
  cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, **data))
  with pytest.raises(DataError, match=message):
    trainer.fit(cfg)
  assert not compiled
