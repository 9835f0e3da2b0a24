"""Published generation_config.json and tokenizer_config.json files are read as by transformers."""

import json
from pathlib import Path

import pytest

from lnssm_jax.pretrained import folders, special_tokens
from lnssm_jax.pretrained.chat import ChatTemplate
from lnssm_jax.pretrained.tokenizers import encode_whole

FOUND = json.loads((Path(__file__).parent / "golden" / "text_settings.json").read_text())
GENERATION, TOKENIZERS = FOUND["generation"], FOUND["tokenizers"]
DRAWN = ("temperature", "top_k", "top_p")


@pytest.mark.parametrize("case", GENERATION)
def test_generation_file_gives_the_options_of_transformers(case, tmp_path):
  given, read = GENERATION[case], GENERATION[case]["read"]
  if given["file"] is not None:
    (tmp_path / "generation_config.json").write_text(json.dumps(given["file"]))
  ours = folders.sample(tmp_path, {"eos_token_id": given["ends"]})
  if case == "without-ends":  # a text ends where config.json says; in transformers nowhere
    assert read["ends"] == [] and ours.pop("stop_tokens") == (2,)
  else:
    assert list(ours.pop("stop_tokens")) == read["ends"]
  assert ours.pop("tokens", None) == read["max_new_tokens"]
  assert ours.pop("repetition_penalty", 1.0) == read["repetition_penalty"]
  if read["do_sample"]:
    assert ours == {x: read[x] for x in DRAWN if x != "top_k" or read[x]}
  else:  # greedy; without a file, by the caller's default
    assert ours.pop("temperature", None) == (None if given["file"] is None else 0)
    assert ours.keys() <= {"top_k", "top_p"}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_tokenizer_files_give_the_tokens_of_transformers(case, tmp_path):
  found = TOKENIZERS[case]
  (tmp_path / "tokenizer.json").write_text(json.dumps(found["tokenizer"]))
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(found["file"]))
  settings = special_tokens.read_settings(tmp_path, follow_links=False)
  names = {name: special_tokens.token_of(settings, name) for name in found["special"]}
  assert names == found["special"]
  end = found["tokenizer"]["model"]["vocab"][names["eos_token"]]
  tokenizer = folders.tokenizer(tmp_path, {"eos_token_id": end})
  assert encode_whole(tokenizer, "some words").tolist() == found["ids"]
  pytest.importorskip("jinja2")
  before = "".join(tokenizer.names_of(tokenizer.added.before))
  prompt = ChatTemplate(tokenizer).prompt([{"role": "user", "content": "words"}])
  assert before + prompt == found["chat"]
