"""`task lm` and `task extrapolate` with given losses: tokens that count, bits per byte."""

import json
import math
import types

import numpy as np
import pytest

from lnssm_jax.pretrained import texts
from lnssm_jax.pretrained.tokenizers import ByteTokenizer
from train.scoring import perplexity


@pytest.fixture
def write(tmp_path):
  """Returns a function that writes rows as .jsonl."""

  def make(rows):
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)

  return make


def test_extrapolate_predicts_the_same_tokens_in_windows_of_all_lengths(monkeypatch, write):
  """Windows of 4 and 6 tokens fill 12 together; of 24 tokens, or of the 20 that are asked for."""
  asked = []

  def score_tokens(model, rows, firsts, batch):
    asked.append([row.tolist() for row in rows])
    assert firsts == [1] * len(rows)
    return [types.SimpleNamespace(log_probs=-np.arange(len(row) - 1.0)) for row in rows]

  monkeypatch.setattr(texts, "score_tokens", score_tokens)
  path = write([{"text": "abcdefghij"}, {"text": "klmnopqrstuvw"}])
  stream = [*b"abcdefghij", 256, *b"klmnopqrstuvw", 256]
  model = types.SimpleNamespace(
    tokenizer=ByteTokenizer(), stop_tokens=(), model=None, source="m", step=1
  )
  for tokens, count in ((None, 24), (20, 12)):
    how = {"train_length": 2, "times": (2, 3), "tokens": tokens}
    rows = perplexity.extrapolate(model, path, **how).tables["lengths"]
    assert [(row["length"], row["tokens"]) for row in rows] == [(4, count), (6, count)]
    for row, windows in zip(rows, asked[-2:], strict=True):
      size = row["length"]
      assert windows == [stream[i : i + size + 1] for i in range(0, count, size)]
      assert row["nats_per_token"] == pytest.approx(np.mean(range(size)))
      assert row["beyond"] == pytest.approx(math.exp(np.mean(range(2, size))))


def test_lm_bits_per_byte_have_the_tokens_per_byte_of_whole_texts(monkeypatch, write):
  """Of 4 and 12 bytes there are 2 and 12 tokens, cut to 2 and 3; 1 and 2 bits per token."""

  def encode_batch(documents):
    return [np.zeros(n, np.int32) for n in (2, 12)]

  def score_tokens(model, rows, firsts, batch):
    sizes = [len(row) - 1 for row in rows]
    return [types.SimpleNamespace(log_probs=np.full(n, -n * math.log(2))) for n in sizes]

  monkeypatch.setattr(texts, "score_tokens", score_tokens)
  model = types.SimpleNamespace(model=None, source="m", step=1)
  model.tokenizer = types.SimpleNamespace(encode_batch=encode_batch, added=ByteTokenizer().added)
  report = perplexity.lm(model, [write([{"text": "abcd"}, {"text": "a" * 12}])], length=3)
  (row,) = report.tables["corpora"]
  assert (row["tokens"], row["bits_per_byte"]) == (1 + 2, pytest.approx(5 / 3 * 14 / 16))
  assert row["document_perplexity"] == pytest.approx(2**1.5)  # documents count alike
  assert [each["bits_per_byte"] for each in report.details["documents"]] == pytest.approx([0.5, 2])


def test_extrapolate_bits_per_byte_count_end_of_text_tokens(monkeypatch, write):
  """One bit per token: 23 bytes and two documents."""

  def score_tokens(model, rows, firsts, batch):
    return [types.SimpleNamespace(log_probs=np.full(len(row) - 1, -math.log(2))) for row in rows]

  monkeypatch.setattr(texts, "score_tokens", score_tokens)
  path = write([{"text": "abcdefghij"}, {"text": "klmnopqrstuvw"}])
  settings = {"model": None, "source": "m", "step": 1, "settings": {"seq_len": 4}}
  model = types.SimpleNamespace(tokenizer=ByteTokenizer(), **settings)
  (row,) = perplexity.extrapolate(model, path, times=(1,)).tables["lengths"]
  assert row["bits_per_byte"] == pytest.approx((23 + 2) / 23)
