"""The adapter of lm_eval against that package's own model for transformers.

tests/pretrained/golden/lm_eval.json is recorded by `make test-peers`, in float64; the package is
not needed here.
"""

import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lnssm_jax import pretrained
from lnssm_jax.pretrained import lm_eval_model
from lnssm_jax.pretrained.harness import Answers
from tests.peers.numbers import parameter

GOLDEN = Path(__file__).parent / "golden"
ANSWERS = json.loads((GOLDEN / "lm_eval.json").read_text())
FILES = json.loads((GOLDEN / "tokenizers.json").read_text())["cases"]
# Decoded alone, the first word of an answer has lost its space.
LOSES_SPACES = ("metaspace_bos",)


def requests(*arguments):
  return [types.SimpleNamespace(args=each) for each in arguments]


def model_of(folder, case):
  """The recorded model, as a published folder with its tokenizer."""
  recorded = ANSWERS["cases"][case]
  (folder / "config.json").write_text(json.dumps(recorded["config"]))
  shapes = recorded["shapes"].items()
  tensors = {name: 3 * parameter("lm_eval", name, shape) for name, shape in shapes}
  save_file({n: x.astype(np.float32) for n, x in tensors.items()}, folder / "model.safetensors")
  (folder / "tokenizer.json").write_text(json.dumps(FILES[case]["tokenizer"]))
  (folder / "tokenizer_config.json").write_text(json.dumps(FILES[case]["config"]))
  return pretrained.load(folder)


@pytest.mark.parametrize(
  "case",
  [case if case == "metaspace_bos" else pytest.param(case, marks=pytest.mark.slow)
   for case in ANSWERS["cases"]],
)  # fmt: skip
def test_answers_are_those_of_the_package(case, tmp_path, monkeypatch):
  api = types.ModuleType("lm_eval.api.model")
  api.LM = type("LM", (), {})
  for name, module in {"lm_eval": api, "lm_eval.api": api, "lm_eval.api.model": api}.items():
    monkeypatch.setitem(sys.modules, name, module)
  recorded = ANSWERS["cases"][case]
  model = lm_eval_model(model_of(tmp_path, case), batch=4, prefix_token=recorded["prefix"])
  found = model.loglikelihood(requests(*ANSWERS["pairs"]))
  totals, greedy = zip(*found, strict=True)
  np.testing.assert_allclose(totals, [total for total, _ in recorded["loglikelihood"]], rtol=2e-5)
  assert list(greedy) == [greedy for _, greedy in recorded["loglikelihood"]]
  rolling = model.loglikelihood_rolling(requests(*((text,) for text in ANSWERS["texts"])))
  np.testing.assert_allclose(rolling, recorded["rolling"], rtol=2e-5)
  asked = [(context, how) for how in ANSWERS["options"] for context in ANSWERS["contexts"]]
  wanted = [text for texts in recorded["generated"] for text in texts]
  for found, theirs in zip(model.generate_until(requests(*asked)), wanted, strict=True):
    assert found.removeprefix(" " if case in LOSES_SPACES else "") == theirs


def test_answers_end_at_every_end_that_the_folder_names(tmp_path):
  (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
  loaded = model_of(tmp_path, "metaspace_bos")
  answers = Answers()
  answers.bind(loaded, 1)
  options, _ = answers._sampling({"until": ["\n"]})
  ends = {loaded.tokenizer.end_of_text, 7, 8}
  assert set(options.stop_tokens) == set(loaded.options().stop_tokens) == ends
