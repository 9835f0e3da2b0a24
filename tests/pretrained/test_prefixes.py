"""Texts that were read, saved and loaded; strings that end a text."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from lnssm_jax.generate import SamplingOptions, generate, read
from lnssm_jax.models import LanguageModel
from lnssm_jax.pretrained import DataError, load_prefix, save_prefix, texts
from lnssm_jax.pretrained.tokenizers import ByteTokenizer
from tests.mixers.helpers import drawn

SIZES = {"vocab_size": 37, "dim": 8, "num_layers": 2, "num_heads": 2}


def build(**changes):
  options = {"mixer": ("lrn", "sliding_window_attention"), "channel_mixer": "none"}
  options["mixer_options"] = {"sliding_window_attention": {"window": 4}}
  return LanguageModel(**SIZES | options | changes, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def model():
  return drawn(build)


@pytest.mark.slow
def test_prefix_saved_and_loaded_continues_equally(model, tmp_path):
  start = read(model, [[1, 2, 3, 4, 5], [6, 7]])
  save_prefix(tmp_path / "x", start)
  loaded = load_prefix(tmp_path / "x", model)
  assert jax.tree.structure(loaded) == jax.tree.structure(start)
  jax.tree.map(np.testing.assert_array_equal, loaded, start)
  options = SamplingOptions(max_tokens=5, temperature=0)
  got = generate(model, [[], [3]], options, start=loaded)
  want = generate(model, [[1, 2, 3, 4, 5], [6, 7, 3]], options)
  assert [row.tolist() for row in got] == [row.tolist() for row in want]


def test_prefix_of_another_model_or_a_damaged_one_raises(model, tmp_path):
  save_prefix(tmp_path / "x", read(model, [[1]]))
  other = nnx.eval_shape(lambda: build(dim=16))
  with pytest.raises(DataError, match="x is of another model: state"):
    load_prefix(tmp_path / "x", other)
  arrays = load_file(tmp_path / "x")
  save_file(arrays | {"length": arrays["length"] - 7}, tmp_path / "x")
  with pytest.raises(DataError, match="x is damaged: it has a length of -6 tokens"):
    load_prefix(tmp_path / "x", model)
  (tmp_path / "x").write_bytes(b"123")
  with pytest.raises(DataError, match="x cannot be read"):
    load_prefix(tmp_path / "x", model)


STREAMS = [
  (("END",), "one EN", "D two", ["one ", ""]),
  (("END",), "one EN", "T two", ["one ", "ENT two"]),
  (("ne", "x"), "one", "", ["o"]),
  ((), "one", " two", ["one", " two"]),
]


@pytest.mark.parametrize(("until", "first", "second", "want"), STREAMS)
def test_stream_ends_before_a_string_and_holds_back_its_beginning(
  until, first, second, want, monkeypatch
):
  seen = []

  def fake(*_, **__):
    for byte in (first + second).encode():
      seen.append(byte)
      yield np.array([byte])

  monkeypatch.setattr(texts.generate, "stream", fake)
  options = SamplingOptions(max_tokens=50)
  pieces = list(texts.stream(None, ByteTokenizer(), "", options, until=until))
  assert "".join(pieces) == "".join(want)
  if until and until[0] in first + second:
    assert bytes(seen).decode().endswith(until[0])  # nothing is drawn after it
  # What was shown after the first part is no more than is certain.
  assert "".join(pieces[: len(first)]) == want[0]


def test_stop_tokens_end_a_streamed_text(monkeypatch):
  fake = lambda *_, **__: iter(np.array([[byte]]) for byte in b"ab!c")
  monkeypatch.setattr(texts.generate, "stream", lambda *a, **k: (x[0] for x in fake()))
  options = SamplingOptions(max_tokens=9, stop_token=(7, ord("!")))
  assert "".join(texts.stream(None, ByteTokenizer(), "", options)) == "ab"
  assert dataclasses.replace(options, stop_token=None).stop_tokens == ()
