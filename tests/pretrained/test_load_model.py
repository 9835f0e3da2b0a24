"""`lnssm_jax.load_model`: exports without the training stack, text in and out, clear errors."""

import dataclasses
import json
import re
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import lnssm_jax
from lnssm_jax.files.reading import digest_of
from lnssm_jax.generate import SamplingOptions, generate
from lnssm_jax.models.settings import abstract_params
from lnssm_jax.pretrained import DataError, ExportError, texts
from lnssm_jax.pretrained.safetensors import Tensors
from lnssm_jax.pretrained.tokenizers import encode_whole
from tests.pretrained.test_tokenizer_files import write as published_tokenizer
from train import config
from train.data.tokenizers import load_tokenizer, train_bpe
from train.runs import export

MODEL = config.Model(
  mixer="lrn", dim=16, num_layers=2, num_heads=2, vocab_size=257, dtype="float32"
)
ROWS = [
  {"kind": "train", "step": 10, "loss": 3.0},
  {"kind": "eval", "step": 10, "set": "a", "val_loss": 2.5},
  {"kind": "train", "step": 20, "loss": 2.0},
]


def write(folder, model=MODEL, tokenizer=None, **run):
  rng = np.random.default_rng(0)
  draw = lambda x: (0.5 * rng.standard_normal(x.shape)).astype(x.dtype)
  params = jax.tree.map(draw, abstract_params(config.to_dict(model)))
  export.write(folder, model, params, tokenizer or load_tokenizer("bytes"), 20, **run)
  return folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
  data = config.Data(folder="/secret", tokenizer="bytes", train=("a",))
  optimizer = config.Optimizer(peak_lr=1e-3, final_lr=1e-4)
  numbers = {"steps": 20, "seq_len": 8, "global_batch": 2, "checkpoint_every": 5, "eval_every": 5}
  sample = config.Sample(tokens=5, temperature=0)
  run = config.Train(
    model=MODEL, optimizer=optimizer, data=data, run_dir="/secret", sample=sample, **numbers
  )
  return write(tmp_path_factory.mktemp("load") / "exported", run=run, metrics=ROWS)


@pytest.fixture(scope="module")
def loaded(exported):
  """The model with its tokenizer, loaded where only the library and what it needs are installed."""
  with pytest.MonkeyPatch.context() as patch:  # forgets no module that is imported meanwhile
    for absent in ("safetensors", "tokenizers", "train", "orbax"):
      patch.setitem(sys.modules, absent, None)
    found = lnssm_jax.load_model(exported)
    assert found.tokenizer.spec == "bytes"
    assert isinstance(found.generate("ab"), str)
  return found


def test_loaded_model_has_settings_and_metrics_without_paths(loaded, exported):
  assert loaded.settings["model"] == config.to_dict(MODEL)
  assert loaded.settings["optimizer"]["peak_lr"] == 1e-3
  assert "/secret" not in (exported / "manifest.json").read_text()
  assert loaded.metrics == [ROWS[2], ROWS[1]]  # the last of each kind and set


def test_loaded_model_prints_itself_briefly(loaded):
  lines = repr(loaded).splitlines()
  assert len(lines) <= 6 and max(map(len, lines)) <= 120
  assert "step 20" in lines[0] and "lrn: 2 layers, dim 16" in lines[1]
  numbers = sum(x.size for x in jax.tree.leaves(loaded.model.init_state(1)))
  assert f"{numbers:,} numbers per sequence" in lines[2]


# Treescope reads deprecated names of NumPy.
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_loaded_model_is_displayed_by_treescope(loaded):
  treescope = pytest.importorskip("treescope")
  text = treescope.render_to_text(loaded)
  assert text.startswith("LoadedModel(") and "model=LanguageModel(" in text
  assert "settings={" in text and "_tokenizer" not in text


def test_generate_takes_options_of_the_run_and_of_the_call(loaded):
  prompt = list(b"ab")
  options = SamplingOptions(max_tokens=5, temperature=0, top_p=0.95, stop_token=256)
  (tokens,) = generate(loaded.model, [prompt], options)
  assert loaded.generate("ab") == loaded.tokenizer.decode(tokens)
  options = SamplingOptions(max_tokens=9, temperature=0, top_p=0.95, stop_token=256)
  (tokens,) = generate(loaded.model, [prompt], options)
  text = loaded.tokenizer.decode(tokens)
  assert loaded.generate("ab", max_tokens=9) == text
  for until in ((), ("never", text[4:6])):
    want = text.split(text[4:6])[0] if until else text
    assert loaded.generate("ab", max_tokens=9, until=until) == want
    assert "".join(loaded.stream("ab", loaded.options(max_tokens=9), until=until)) == want


def test_generate_takes_all_options_of_a_call(loaded, monkeypatch):
  found = []
  each = lambda model, tokenizer, prompts, options, **how: found.append(options) or prompts
  monkeypatch.setattr(texts, "complete_each", each)
  given = {"max_tokens": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.5, "seed": 6}
  given |= {"min_p": 0.1, "repetition_penalty": 1.5}
  loaded.generate("ab", **given)
  assert found == [loaded.options(**given)]


def test_options_of_a_run_that_prints_no_text_have_the_default_length(loaded):
  silent = dataclasses.replace(loaded, settings={"sample": {"tokens": 0, "temperature": 0}})
  assert (silent.options().max_tokens, silent.options().temperature) == (200, 0)
  with pytest.raises(ValueError, match="max_tokens=0"):
    silent.options(max_tokens=0)


@pytest.mark.parametrize("context", ["", "xy"])
def test_score_equals_log_softmax_of_one_call(loaded, monkeypatch, context):
  monkeypatch.setattr(texts, "_CHUNK", 4)
  text = "hello, world"
  tokens = np.frombuffer((context + text).encode(), np.uint8).astype(np.int32)
  logits = np.asarray(loaded.model(tokens[None])[0][0], np.float64)
  log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  reference = log_probs[np.arange(len(tokens) - 1), tokens[1:]]
  reference = reference[max(0, len(context) - 1) :]
  score = loaded.score(text, context=context)
  assert score.tokens.tolist() == tokens[max(1, len(context)) :].tolist()
  np.testing.assert_allclose(score.log_probs, reference, atol=2e-5)
  np.testing.assert_allclose(score.total, reference.sum(), rtol=1e-5)
  np.testing.assert_allclose(score.perplexity, np.exp(-reference.mean()), rtol=1e-5)


def test_score_without_a_token_to_score_raises(loaded):
  for text, context in (("", ""), ("a", ""), ("", "abc")):
    with pytest.raises(ValueError, match="no token to score after"):
      loaded.score(text, context=context)


@pytest.mark.parametrize(
  ("text", "context", "message"),
  [
    ([1], "", "text has 1 of type int, which is no text; give a str, or a list"),
    (None, "", "text has None of type NoneType"),
    (["a", b"b"], "", r"text has b'b' of type bytes"),
    (b"ab", "", r"text has b'ab' of type bytes"),
    (np.array("ab"), "", "text has array"),
    ("ab", None, "context has None of type NoneType"),
    (["ab"], [2], "context has 2 of type int"),
  ],
)
def test_score_of_no_text_raises(loaded, text, context, message):
  with pytest.raises(ValueError, match=message):
    lnssm_jax.score(loaded, text, context=context)


@pytest.mark.parametrize("batch", [0, -1, 1.5, "2", None])
def test_score_with_a_batch_of_no_positive_number_raises(loaded, batch):
  with pytest.raises(ValueError, match=r"batch=.* must be"):
    lnssm_jax.score(loaded, "ab", batch=batch)


def test_score_by_a_model_without_a_tokenizer_raises(loaded):
  with pytest.raises(ValueError, match="model is of the class LanguageModel; give a LoadedModel"):
    lnssm_jax.score(loaded.model, "ab")


@pytest.mark.parametrize(
  "change",
  [
    {"mixer": "softmax_attention", "mixer_options": {"max_length": 6}},
    {"learned_positions": 6},
  ],
  ids=lambda change: next(iter(change)),
)
def test_text_longer_than_the_cache_raises(tmp_path, change):
  model = config.Model(**{**config.to_dict(MODEL), **change})
  loaded = lnssm_jax.load_model(write(tmp_path / "exported", model))
  assert "of at most 6 tokens" in repr(loaded)
  assert len(loaded.score("1234567").tokens) == 6  # the last token is not read
  with pytest.raises(ValueError, match=r"text of 8 tokens, .* max_length=6 holds"):
    loaded.score("12345678")
  with pytest.raises(ValueError, match=r"max_tokens=5 after a prompt of 3 tokens"):
    loaded.generate("abc", max_tokens=5)


def test_tokenizer_without_its_package_raises(tmp_path, monkeypatch):
  tokenizer = train_bpe("bpe:260", tmp_path, ["a b a b a b c c c"])
  model = config.Model(**{**config.to_dict(MODEL), "vocab_size": 258})
  folder = write(tmp_path / "exported", model, tokenizer)
  with pytest.raises(ValueError, match="gives token 259, but the model's vocabulary is 0 to 257"):
    lnssm_jax.load_model(folder).score("a b a b c c")
  monkeypatch.setitem(sys.modules, "tokenizers", None)
  with pytest.raises(DataError, match="pip install tokenizers"):
    _ = lnssm_jax.load_model(folder).tokenizer


def test_export_with_a_number_that_is_not_finite_names_its_tensor(tmp_path):
  params = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), abstract_params(config.to_dict(MODEL)))
  params["norm"]["scale"][3] = np.nan
  export.write(tmp_path / "exported", MODEL, params, load_tokenizer("bytes"), 20)
  with pytest.raises(ExportError, match=r"norm\.scale has numbers that are NaN or infinite"):
    lnssm_jax.load_model(tmp_path / "exported")


def test_command_of_an_error_is_quoted_for_the_shell(tmp_path):
  folder = tmp_path / "a $(touch x)"
  (folder / "checkpoints").mkdir(parents=True)
  (folder / "config.json").write_text("{}")
  with pytest.raises(ExportError, match=re.escape(f"train export '{folder}' --out EXPORTED")):
    lnssm_jax.load_model(folder)


def test_folder_that_is_no_export_raises_with_what_was_sought(tmp_path):
  with pytest.raises(ExportError, match="there is no folder"):
    lnssm_jax.load_model(tmp_path / "absent")
  (tmp_path / "notes.txt").write_text("")
  with pytest.raises(ExportError, match=r"manifest\.json .*config\.json.*; it has notes\.txt"):
    lnssm_jax.load_model(tmp_path)
  (tmp_path / "config.json").write_text("{}")
  (tmp_path / "checkpoints").mkdir()
  with pytest.raises(ExportError, match=r"is a run folder, .*train export"):
    lnssm_jax.load_model(tmp_path)


def test_tensors_equal_those_of_the_safetensors_library(tmp_path):
  rng = np.random.default_rng(0)
  arrays = {
    name: rng.integers(-9, 9, (3, 2)).astype(name)
    for name in ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8")
  }
  arrays |= {
    "bfloat16": rng.standard_normal((5,)).astype(ml_dtypes.bfloat16),
    "bool": np.array([True, False]),
    "empty": np.zeros((0, 4), np.float32),
    "number": np.array(3.5, np.float32),
  }
  safetensors.numpy.save_file(arrays, tmp_path / "x", metadata={"format": "np"})
  tensors = Tensors(tmp_path / "x")
  assert sorted(tensors) == sorted(arrays) and len(tensors) == len(arrays)
  for name, array in arrays.items():
    array = np.asarray(array)
    assert tensors.kind(name) == (str(array.dtype), array.shape)
    assert tensors[name].dtype == array.dtype and tensors[name].shape == array.shape
    assert tensors[name].tobytes() == array.tobytes()


@pytest.mark.parametrize("add", ["file", "none"])
def test_exported_tokenizer_puts_the_same_around_a_text(tmp_path, add):
  """Also where it was said in another file; an export of an older version puts nothing there."""
  config = {"add_eos_token": True, "eos_token": "</s>"}
  path = published_tokenizer(tmp_path / "theirs", "metaspace_bos", config)
  tokenizer = load_tokenizer(str(path), add_special_tokens=add)
  model = dataclasses.replace(MODEL, vocab_size=405)
  folder = write(tmp_path / "exported", model, tokenizer)
  found = lnssm_jax.load_model(folder).tokenizer
  assert found.added == tokenizer.added == (((1,), (2,)) if add == "file" else ((), ()))
  assert encode_whole(found, "a <s>").tolist() == encode_whole(tokenizer, "a <s>").tolist()
  (folder / "tokenizer.json").write_bytes(tokenizer.raw)
  if add == "file":
    with pytest.raises(ExportError, match=r"has changed since it was written"):
      repr(lnssm_jax.load_model(folder).tokenizer)
  else:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["tokenizer"]["fingerprint"] = tokenizer.fingerprint
    manifest["sha256"] = digest_of({k: v for k, v in manifest.items() if k != "sha256"})
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert lnssm_jax.load_model(folder).tokenizer.added == ((), ())


def file_of(header, data=b"", length=None):
  raw = header if isinstance(header, bytes) else json.dumps(header).encode()
  return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (b"", "ends in its header"),
    (file_of({"a": ONE}, b"", 2**60), "ends in its header"),
    (file_of(b"{]"), "header of x is damaged"),
    (file_of(b"[]"), "header of x is damaged"),
    (file_of(b'{"a": 1, "a": 2}'), "duplicate key"),
    (file_of({"a": {**ONE, "dtype": "F31"}}, bytes(8)), "header of x is damaged"),
    (file_of({"a": {**ONE, "shape": [3]}}, bytes(8)), "8 bytes are not of shape"),
    (file_of({"a": {**ONE, "shape": [-1, -2]}}, bytes(8)), "not whole numbers"),
    (file_of({"a": ONE}, bytes(7)), "other than its header says"),
    (file_of({"a": ONE}, bytes(9)), "other than its header says"),
    (file_of({"a": ONE, "b": ONE}, bytes(8)), "other than its header says"),
  ],
)
def test_damaged_safetensors_file_raises(tmp_path, content, message):
  (tmp_path / "x").write_bytes(content)
  with pytest.raises(ValueError, match=message):
    Tensors(tmp_path / "x")
