"""Tokenizers of published folders against what transformers makes of their files.

tests/pretrained/golden/tokenizers.json is recorded by `make test-peers`.
"""

import functools
import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from lnssm_jax.files.reading import DataError
from lnssm_jax.pretrained.continuations import Continuation
from lnssm_jax.pretrained.special_tokens import Added
from lnssm_jax.pretrained.tokenizers import ByteTokenizer, FileTokenizer, encode_whole
from train.data import load_tokenizer

GOLDEN = json.loads((Path(__file__).parent / "golden" / "tokenizers.json").read_text())
TEXTS, CASES = GOLDEN["texts"], GOLDEN["cases"]
SEQUENCE = {"Sequence": {"id": "A", "type_id": 0}}


@functools.cache
def content(case):
  return json.dumps(CASES[case]["tokenizer"])


def write(folder, case, config=None, **changes):
  """The folder of a case, with other settings where given."""
  folder.mkdir(exist_ok=True)
  text = json.dumps(CASES[case]["tokenizer"] | changes) if changes else content(case)
  (folder / "tokenizer.json").write_text(text)
  config = CASES[case]["config"] if config is None else config
  (folder / "tokenizer_config.json").write_text(json.dumps(config))
  return folder / "tokenizer.json"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
  """The tokenizer of each case."""
  folder = tmp_path_factory.mktemp("files")
  return functools.cache(lambda case: load_tokenizer(str(write(folder / case, case).parent)))


def bos_of(tokenizer):
  return list(tokenizer.added.before)


@pytest.mark.parametrize("case", CASES)
def test_encoding_is_that_of_the_files(loaded, case):
  recorded, tokenizer = CASES[case], loaded(case)
  for text, whole, plain in zip(TEXTS, recorded["whole"], recorded["plain"], strict=True):
    assert encode_whole(tokenizer, text).tolist() == whole
    assert tokenizer.encode(text).tolist() == plain
    before, after = map(list, tokenizer.added)
    assert [*before, *tokenizer.encode(text, "parse").tolist(), *after] == whole


@pytest.mark.parametrize("case", CASES)
def test_decoding_is_that_of_the_files(loaded, case):
  for ids, text in zip(CASES[case]["whole"], CASES[case]["decoded"], strict=True):
    assert loaded(case).decode(ids) == text


@pytest.mark.parametrize("case", CASES)
def test_continuation_is_the_whole_without_the_prompt(loaded, case):
  """However many tokens are added at once; what was shown does not change."""
  tokenizer = loaded(case)
  for prompt, tokens, text in CASES[case]["continuations"]:
    for step in (1, 5, len(tokens)):
      found, shown = Continuation(tokenizer, prompt), ""
      for first in range(0, len(tokens), step):
        found.add(tokens[first : first + step])
        assert found.shown.startswith(shown)
        shown = found.shown
      assert found.text == text
      assert found.text.startswith(shown)


@pytest.mark.parametrize("case", ["byte_level", "metaspace_bos", "unigram_eos", "bytes"])
def test_long_continuation_is_that_of_one_decoding(loaded, case):
  """Also beyond the tokens that are decoded again with new ones."""
  tokenizer = ByteTokenizer() if case == "bytes" else loaded(case)
  rng = np.random.default_rng(1)
  words = np.concatenate([tokenizer.encode(f" {word} \u4f60") for word in ("the", "sea", "x")])
  drawn = rng.integers(3, tokenizer.vocab_size, 300)
  for tokens in (np.tile(words, 30), np.where(rng.random(300) < 0.8, np.resize(words, 300), drawn)):
    kept = [int(i) for i in tokens if i != tokenizer.end_of_text]
    prompt, rest = kept[:90], kept[90:]
    found, shown = Continuation(tokenizer, [*bos_of(tokenizer), *prompt]), ""
    for token in rest:
      found.add([token])
      assert found.shown.startswith(shown)
      shown = found.shown
    before, whole = tokenizer.decode(prompt), tokenizer.decode(kept)
    same = next((n for n, x in enumerate(before) if whole[n : n + 1] != x), len(before))
    assert found.text == whole[same:]
    assert len(found.text) - len(shown) < 40


@pytest.mark.parametrize("case", CASES)
def test_tokens_of_a_continuation_are_those_of_the_whole_text(loaded, case):
  """Every character is in a token before the boundary or after it, and none is in both."""
  tokenizer = loaded(case)
  for context, text in [
    ("The capital", " of France"),
    ("Pa", "ris is"),
    ("caf\u00e9 \u4f60", "\u597d"),
    ("e", "\u0301x"),
    ("a ", "word"),
    ("", "Paris"),
  ]:
    ((tokens, start),) = tokenizer.encode_continuations([(context, text)])
    assert tokens.tolist() == tokenizer.encode(context + text).tolist()
    alone = tokenizer.encode(context).tolist()
    composed = context == "e" and case in ("unigram_eos", "neox_class")
    if len(tokens) > len(alone) and tokens[: len(alone)].tolist() == alone and not composed:
      assert start == len(alone)
    else:  # a token has characters of both: it is scored
      assert start < len(alone) and tokens[:start].tolist() == alone[:start]


def test_boundary_of_a_continuation_in_a_later_piece(loaded, monkeypatch):
  from lnssm_jax.pretrained import tokenizers

  monkeypatch.setattr(tokenizers, "PIECE", 4)
  tokenizer = loaded("byte_level")
  context, text = "one\ntwo\nthree\nfour", "teen\nfive\nsix"
  pairs = [(context, text), (context[:14], context[14:]), ("", text), (context, "")]
  for (before, after), (tokens, start) in zip(
    pairs, tokenizer.encode_continuations(pairs), strict=True
  ):
    assert len(tokenizer.pieces(before + after)) > 2
    assert tokens.tolist() == tokenizer.encode(before + after).tolist()
    kept = tokenizer.decode(tokens[:start])
    assert before.startswith(kept) and len(before) - len(kept) < 4


def stops(case, loaded, text, until, prompt="The capital"):
  tokenizer = loaded(case)
  tokens = tokenizer.encode(prompt + text)[len(tokenizer.encode(prompt)) :]
  found = Continuation(tokenizer, encode_whole(tokenizer, prompt), until)
  shown = ""
  for token in tokens:
    found.add([token])
    assert found.shown.startswith(shown)
    shown = found.shown
  at_once = Continuation(tokenizer, encode_whole(tokenizer, prompt), until)
  at_once.add(tokens)
  assert (at_once.text, at_once.ended) == (found.text, found.ended)
  return found.text


@pytest.mark.parametrize("case", ["byte_level", "metaspace_bos", "unigram_eos"])
def test_strings_that_end_a_text_are_found(case, loaded):
  """With their space, over several tokens, and the first that is complete."""
  assert stops(case, loaded, " of France is Paris", [" Pa"]) == " of France is"
  assert stops(case, loaded, " of France is Paris", ["ance is P"]) == " of Fr"
  assert stops(case, loaded, " of France", [" of F", "of"]) == " "
  assert stops(case, loaded, " of France", [" France", "nothing", "ce"]) == " of"
  assert stops(case, loaded, " of of of off", [" of off"]) == " of of"
  assert stops(case, loaded, " ererrererrf", ["ererrf"]) == " ererr"
  assert stops(case, loaded, " of France", ["x" * 5]) == " of France"
  assert stops(case, loaded, " of", [" of", " o"]) == ""


def test_bytes_of_one_run_are_decoded_together(loaded):
  """Of characters that begin in the prompt, further back than what is decoded again."""
  tokenizer = loaded("metaspace_bos")
  known = tokenizer.encode("the capital of the river " * 4).tolist()
  run = [token for token in tokenizer.encode("\u4f60" * 30).tolist() if tokenizer.is_byte(token)]
  assert len(run) == 90
  for cut in (50, 51, 52):
    found = Continuation(tokenizer, [*known, *run[:cut]])
    found.add(run[cut:])
    assert found.text == "\u4f60" * (30 if cut % 3 else 13)  # of the prompt alone, or U+FFFD
  # A string may be there, and be gone with the next byte: it ends the text.
  line, broken = tokenizer.encode("~").tolist()[-1], run[0]
  assert tokenizer.is_byte(line) and tokenizer.decode([line, broken]) == "\ufffd" * 2
  for parts in ([[line, broken]], [[line], [broken]]):
    found = Continuation(tokenizer, known, ["~"])
    for part in parts:
      found.add(part)
    assert (found.text, found.ended) == ("", True)


def test_first_word_after_tokens_without_text_keeps_its_space(loaded):
  """Tokens that are decoded again have a text, or the space would be that of its beginning."""
  tokenizer = loaded("metaspace_bos")
  spaces = [token for token in tokenizer.encode("a  b").tolist() if tokenizer.decode([token]) == ""]
  assert spaces
  found = Continuation(tokenizer, [*tokenizer.encode("word").tolist(), *spaces[:1] * 60])
  found.add(tokenizer.encode("Paris"))
  assert found.text == " Paris"


def test_long_string_that_ends_a_text_costs_no_more_than_the_text(loaded):
  """1 MB took over 60 s; the time is that of a short one."""
  import time

  tokenizer = loaded("byte_level")
  tokens = tokenizer.encode(" the river" * 100)
  start = time.monotonic()
  found = Continuation(tokenizer, tokens[:5], [" the river" * 100_000, "ab" * 500_000])
  for token in tokens:
    found.add([token])
  assert found.text and not found.ended
  assert time.monotonic() - start < 5


def test_held_back_is_no_more_than_a_beginning(loaded):
  found = Continuation(loaded("byte_level"), [5], ["abcabd", "xyz"])
  for text, shown in [("qabc", "q"), ("abca", "qabc"), ("bx", "qabcabcab"), ("y", "qabcabcab")]:
    found.add(loaded("byte_level").encode(text))
    assert found.shown == shown
  found.add(loaded("byte_level").encode("z"))
  assert found.ended and found.text == found.shown == "qabcabcab"


FLAGS = [
  # class, template before, after; settings -> what is put around a text.
  (None, [], [], {}, "", ""),
  (None, ["<s>"], ["</s>"], {}, "B", "E"),
  (None, [], [], {"add_bos_token": True}, "B", ""),
  (None, [], [], {"add_eos_token": True}, "", "E"),
  (None, ["<s>"], [], {"add_bos_token": True, "add_eos_token": True}, "B", "E"),
  (None, ["<s>"], ["</s>"], {"add_bos_token": False, "add_eos_token": False}, "", ""),
  ("LlamaTokenizer", [], [], {}, "B", ""),
  ("LlamaTokenizerFast", ["<s>"], [], {}, "B", ""),
  ("LlamaTokenizer", [], [], {"add_bos_token": False}, "", ""),
  ("LlamaTokenizer", [], [], {"bos_token": None}, "", ""),
  ("GemmaTokenizer", [], [], {"bos_token": {"content": "<s>"}}, "B", ""),
  ("GPTNeoXTokenizerFast", ["<s>"], ["</s>"], {}, "", ""),
  ("GPTNeoXTokenizerFast", [], [], {"add_bos_token": True}, "B", ""),
  ("PreTrainedTokenizerFast", ["<s>"], [], {}, "B", ""),
]


def template(before, after):
  part = lambda name: {"SpecialToken": {"id": name, "type_id": 0}}
  single = [*map(part, before), SEQUENCE, *map(part, after)]
  known = {"<s>": 1, "</s>": 2}
  special = {name: {"id": name, "ids": [i], "tokens": [name]} for name, i in known.items()}
  return {
    "type": "TemplateProcessing",
    "single": single,
    "pair": single,
    "special_tokens": special,
  }


@pytest.mark.parametrize(("kind", "before", "after", "settings", "bos", "eos"), FLAGS)
def test_settings_next_to_the_file_add_bos_and_eos(
  tmp_path, kind, before, after, settings, bos, eos
):
  config = {"bos_token": "<s>", "eos_token": "</s>"} | settings
  config |= {"tokenizer_class": kind} if kind else {}
  post = template(before, after) if before or after else None
  path = write(tmp_path / "a", "metaspace_bos", config, post_processor=post)
  for spec in (path, path.parent):
    tokenizer = load_tokenizer(str(spec))
    assert tokenizer.added == Added((1,) * len(bos), (2,) * len(eos))
    none = load_tokenizer(str(spec), add_special_tokens="none")
    assert none.added == Added()
    assert (none.fingerprint == tokenizer.fingerprint) == (not bos and not eos)
  # The content that `export` writes says the same without tokenizer_config.json.
  for each in (tokenizer, none):
    (tmp_path / "alone.json").write_bytes(each.standalone)
    alone = FileTokenizer(tmp_path / "alone.json")
    assert alone.added == each.added
    assert encode_whole(alone, "a word").tolist() == encode_whole(each, "a word").tolist()


def test_settings_are_those_of_both_files_and_of_several_steps(tmp_path):
  path = write(tmp_path / "a", "metaspace_bos", {"add_bos_token": True}, post_processor=None)
  (tmp_path / "a" / "special_tokens_map.json").write_text('{"bos_token": {"content": "</s>"}}')
  assert FileTokenizer(path).added == Added((2,))
  byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
  steps = [byte_level, template(["</s>", "<s>"], ["<s>"])]
  for several in (steps, steps[::-1], [{"type": "Sequence", "processors": steps}]):
    post = {"type": "Sequence", "processors": several}
    path = write(tmp_path / "b", "metaspace_bos", {}, post_processor=post)
    assert FileTokenizer(path).added == Added((2, 1), (1,))


@pytest.mark.parametrize(
  ("config", "changes", "message"),
  [
    ({"add_bos_token": True}, {"post_processor": None}, "bos_token=None is not in the vocabulary"),
    ({"add_bos_token": True, "bos_token": "<q>"}, {}, "bos_token='<q>' is not in the vocabulary"),
    ({"add_eos_token": "yes"}, {}, "add_eos_token='yes' must be true or false"),
    (
      {},
      {"post_processor": template([], []) | {"single": [SEQUENCE, SEQUENCE]}},
      "post_processor .* has the text 2 times",
    ),
    (
      {},
      {"post_processor": {"type": "Sequence", "processors": [template(["<s>"], [])] * 2}},
      "several of its steps add tokens",
    ),
    (
      {"added_tokens_decoder": {"1": {"content": "<s>"}, "320": {"content": "<|user|>"}}},
      {},
      r"has no token '<\|user\|>', which tokenizer_config.json .* \(1 in all\)",
    ),
    ({"additional_special_tokens": ["<s>", "<a>", "<b>"]}, {}, r"no token '<a>', .* \(2 in all\)"),
    ({"extra_special_tokens": ["<s>", "<a>"]}, {}, r"no token '<a>', .* \(1 in all\)"),
    ({"extra_special_tokens": {"image_token": "<a>"}}, {}, r"no token '<a>', .* \(1 in all\)"),
    ({}, {"post_processor": template(["<s>"] * 65, [])}, "puts 65 special tokens around a text"),
  ],
)
def test_files_that_cannot_be_followed_are_named(tmp_path, config, changes, message):
  path = write(tmp_path / "a", "metaspace_bos", config, **changes)
  with pytest.raises(DataError, match=message):
    FileTokenizer(path)


def test_special_tokens_of_another_argument_are_named(loaded):
  for tokenizer in (ByteTokenizer(), loaded("byte_level")):
    with pytest.raises(ValueError, match=r"^special_tokens='plain' must be 'parse' .*or 'text'"):
      tokenizer.encode("a", "plain")


def test_dropout_of_merges_is_switched_off(tmp_path, loaded):
  model = CASES["byte_level"]["tokenizer"]["model"] | {"dropout": 0.5}
  tokenizer = FileTokenizer(write(tmp_path / "a", "byte_level", model=model))
  text = "the capital of the river " * 4
  wanted = loaded("byte_level").encode(text).tolist()
  assert all(tokenizer.encode(text).tolist() == wanted for _ in range(5))
  assert all(tokenizer.encode(text, "parse").tolist() == wanted for _ in range(5))


def test_tokenizer_of_another_process_puts_the_same_tokens_around_a_text(tmp_path):
  """As of the server's, which gets it pickled: also tokens that the files do not have."""
  path = write(tmp_path / "a", "byte_level")
  tokenizer = FileTokenizer(path, added=Added((3,), (4, 5)), end_of_text=2)
  again = pickle.loads(pickle.dumps(tokenizer))
  for name in ("added", "end_of_text", "fingerprint", "spec", "vocab_size"):
    assert getattr(again, name) == getattr(tokenizer, name), name


def test_added_tokens_that_would_fill_memory_are_named(tmp_path):
  added = CASES["byte_level"]["tokenizer"]["added_tokens"]
  long = added[0] | {"id": 5000, "content": "ab" * 600_000}
  path = write(tmp_path / "a", "byte_level", added_tokens=[*added, long])
  with pytest.raises(DataError, match=r"added tokens have 1,200,\d+ bytes, more than 1,048,576"):
    FileTokenizer(path)
