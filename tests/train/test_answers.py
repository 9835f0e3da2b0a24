"""`generate --prompts FILE --output FILE`, and lists of texts: any batch, any interruption."""

import datetime
import itertools
import json

import pyarrow.parquet
import pytest

import lnssm_jax
from lnssm_jax.pretrained import texts
from tests.pretrained.test_save_model import random_model
from train.cli import commands
from train.cli.main import main
from train.data.errors import DataError
from train.runs import answers

PROMPTS = ["abc", "the long", "bcd", "defg f"]


def test_rows_continue_after_an_interruption_as_one_call_writes_them(tmp_path, monkeypatch, capsys):
  lnssm_jax.save_model(tmp_path / "model", random_model(mixer="lrn", num_layers=1), "bytes")
  loaded = lnssm_jax.load_model(tmp_path / "model")
  options = loaded.options(max_tokens=6, seed=3)
  one_call = texts.complete(loaded.model, loaded.tokenizer, PROMPTS, options)
  assert len(set(one_call)) == len(PROMPTS)
  assert loaded.generate(PROMPTS, max_tokens=6, seed=3, batch=2) == one_call
  assert loaded.generate([]) == []
  scores = loaded.score(["ab", "abc"], batch=1)
  assert scores[1].total < scores[0].total and len(scores[1].tokens) == 2

  rows = [{"id": number, "prompt": prompt} for number, prompt in enumerate(PROMPTS)]
  file, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
  file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  given = ("--run-dir", tmp_path / "model", "--max-tokens", 6, "--prompts", file)
  run = lambda *more: main(["generate", *map(str, (*given, "--output", output, *more))])
  assert run("--batch", 0) == 2 and not list(tmp_path.glob("out*"))
  assert "batch=0 must be an integer of at least 1" in capsys.readouterr().err
  whole = texts.complete_each
  with monkeypatch.context() as patch:
    two = lambda *args, **how: itertools.islice(whole(*args, **how), 2)
    interrupted = lambda *args, **how: itertools.chain(two(*args, **how), map(_stop, [0]))
    patch.setattr(texts, "complete_each", interrupted)
    assert run("--seed", 3, "--batch", 2) == 130
  partial = tmp_path / "out.jsonl.partial"
  # The second row is kept as it is there; of the third only a piece was written.
  partial.write_text(
    partial.read_text().replace(json.dumps(one_call[1]), '"kept"') + '{"id": 2, "p'
  )
  assert not output.exists()
  kept = partial.read_text()
  partial.write_text(kept.replace('{"id": 1', '{"id": 7'))
  assert run("--seed", 3) == 2 and "line 3, does not have row 2 of" in capsys.readouterr().err
  partial.write_text(kept)
  assert run("--seed", 4) == 2 and "rows with another seed: 3, not 4" in capsys.readouterr().err
  with monkeypatch.context() as patch:  # of the average: the record is of the last parameters
    patch.setattr(commands, "_model", lambda options: loaded)
    assert run("--seed", 3, "--ema") == 2
  assert "rows with another ema: False, not True" in capsys.readouterr().err
  assert run("--seed", 3, "--batch", 2) == 0
  assert "4 of 4 prompts" in capsys.readouterr().err
  found = [json.loads(line) for line in output.read_text().splitlines()]
  want = [row | {"generated": text} for row, text in zip(rows, one_call, strict=True)]
  want[1]["generated"] = "kept"
  assert found == want and not partial.exists()
  assert run("--seed", 3) == 2 and "exists already" in capsys.readouterr().err
  # Another process of the same call has just finished: nothing is written twice, or left.
  seen = iter([lambda output: None, answers._check_new])
  monkeypatch.setattr(answers, "_check_new", lambda output: next(seen)(output))
  before = output.stat().st_mtime_ns
  assert run("--seed", 3) == 2 and "exists already" in capsys.readouterr().err
  assert output.stat().st_mtime_ns == before and not partial.exists()


def _stop(_):
  raise KeyboardInterrupt


@pytest.mark.parametrize("value", [datetime.date(2026, 1, 1), b"x", float("nan")])
def test_prompts_with_a_column_that_json_does_not_have_are_named(tmp_path, value):
  path = tmp_path / "a.parquet"
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "a", "x": value}]), path)
  with pytest.raises(DataError, match=r"row 1: .* JSON .*; leave that column out, or make it text"):
    answers.write(None, path, tmp_path / "out", None)
  assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
  "arguments, message",
  [
    (("--prompts", "a.jsonl"), "--prompts FILE and --output FILE go together"),
    (("--prompt-file", "a.jsonl"), "use --prompts FILE --output FILE"),
    (("--prompts", "a.jsonl", "--prompt", "b"), "--prompt and --prompts are both there"),
  ],
)
def test_arguments_that_mean_something_else_are_rejected(arguments, message, capsys):
  assert main(["generate", "--run-dir", "none", *arguments]) == 2
  assert message in capsys.readouterr().err
