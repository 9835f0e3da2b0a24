"""Tokenizers: round trips, ids, training and errors."""

import json
import subprocess
import sys

import numpy as np
import pytest

from lnssm_jax.pretrained import tokenizers as files
from train.data import DataError, IndexedDataset, load_tokenizer
from train.data import tokenizers as ours

TEXTS = [
  "",
  "plain words",
  "  spaces   and\ttabs\n\n\n  lines \n\r\n x",
  "\u00e9t\u00e9, \u4f60\u597d, \U0001f600, \u0000 \ufeff",
  "def f(x):\n    return x + 1\n" * 40,
  "<|endoftext|> spelled out",
  "\n" * 50,
]
CORPUS = [
  "pack my box with five dozen liquor jugs\n" * 20,
  "def f(x):\n  return [x, x]\n" * 20,
  "\u4f60\u597d " * 20,
  "a\n\n\nb \n \n\n  c" * 20,
]


@pytest.fixture(scope="module")
def bpe_folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("bpe")
  ours.train_bpe("bpe:300", folder, CORPUS)
  return folder


@pytest.fixture(params=["bytes", "bpe:300"])
def tokenizer(request, bpe_folder):
  return load_tokenizer(request.param, bpe_folder)


@pytest.fixture
def neox(given):
  return load_tokenizer(str(given("tokenizers/20B_tokenizer.json")))


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_tokenizer_round_trip_exact(tokenizer, text):
  ids = tokenizer.encode(text)
  assert ids.dtype == np.int32 and ids.ndim == 1
  assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == text
  assert tokenizer.end_of_text not in ids
  assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_tokenizer_batch_matches_single_texts(tokenizer):
  batch = tokenizer.encode_batch(TEXTS)
  assert [ids.tolist() for ids in batch] == [tokenizer.encode(text).tolist() for text in TEXTS]
  assert all(ids.dtype == np.int32 for ids in batch)


def test_tokenizer_decode_end_of_text_and_invalid_bytes(tokenizer):
  ids = [*tokenizer.encode("a\u00e9"), tokenizer.end_of_text, *tokenizer.encode("b")]
  assert tokenizer.decode(ids) == "a\u00e9b"
  assert tokenizer.decode(load_tokenizer("bytes").encode("\u00e9")[:1]) != ""


def test_byte_tokenizer_ids_are_bytes():
  tokenizer = load_tokenizer("bytes")
  assert tokenizer.encode("a\u00e9").tolist() == [97, 0xC3, 0xA9]
  assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)
  assert tokenizer.decode([0xC3, 256, 97, 256]) == "\ufffda"


def test_tokenizer_unpaired_surrogate_raises(tokenizer):
  for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
    with pytest.raises(DataError, match="an unpaired surrogate at character 1"):
      encode("a\udc80")


def test_bpe_size_as_requested_and_compresses(bpe_folder):
  tokenizer = load_tokenizer("bpe:300", bpe_folder)
  assert tokenizer.vocab_size == 300 and tokenizer.end_of_text == 0
  assert len(tokenizer.encode(CORPUS[0])) < len(CORPUS[0]) / 2
  assert tokenizer.fingerprint == load_tokenizer(str(bpe_folder / "tokenizer.json")).fingerprint
  assert sorted(path.name for path in bpe_folder.iterdir()) == ["tokenizer.json"]


def test_bpe_smallest_is_bytes(tmp_path):
  tokenizer = ours.train_bpe("bpe:257", tmp_path, CORPUS)
  assert tokenizer.vocab_size == 257
  for text in TEXTS:
    assert len(tokenizer.encode(text)) == len(text.encode())


def test_bpe_same_in_every_process(bpe_folder, tmp_path):
  code = (
    "import sys; from train.data import tokenizers; import json;"
    "tokenizers.train_bpe('bpe:300', sys.argv[1], json.loads(sys.stdin.read()))"
  )
  for threads in ("1", "3"):
    folder = tmp_path / threads
    folder.mkdir()
    subprocess.run(
      [sys.executable, "-W", "error", "-c", code, folder],
      input=json.dumps(CORPUS).encode(),
      env={"RAYON_NUM_THREADS": threads, "PYTHONPATH": ":".join(sys.path)},
      check=True,
    )
    assert ours.bpe_path(folder).read_bytes() == ours.bpe_path(bpe_folder).read_bytes()


def test_bpe_too_little_text_named(tmp_path):
  with pytest.raises(DataError, match=r"supports only (\d+) entries .*use 'bpe:\1' or fewer"):
    ours.train_bpe("bpe:5000", tmp_path, CORPUS)
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("spec", ["bpe:", "bpe:256", "bpe:-5", "bpe:x", "bpe:\u0664\u0660\u0660"])
def test_bpe_invalid_size_rejected(tmp_path, spec):
  with pytest.raises(DataError, match="a whole number of entries of at least 257"):
    load_tokenizer(spec, tmp_path)


def test_bpe_missing_or_different_named(tmp_path, bpe_folder):
  with pytest.raises(DataError, match=r"tokenizer.json does not exist: .*lnssm-train tokenize"):
    load_tokenizer("bpe:300", tmp_path)
  with pytest.raises(DataError, match=r"set data\.folder"):
    load_tokenizer("bpe:300")
  with pytest.raises(DataError, match=r"has 300 entries, but .* needs 400; set .*'bpe:300'"):
    load_tokenizer("bpe:400", bpe_folder)


def test_tokenizer_file_invalid_named(tmp_path):
  (tmp_path / "broken.json").write_text('{"model": ')
  (tmp_path / "other.json").write_text('{"a": 1}')
  with pytest.raises(DataError, match=r"no tokenizer '.*absent.json'; use 'bytes', 'bpe:N'"):
    load_tokenizer(str(tmp_path / "absent.json"))
  for name in ("broken", "other"):
    with pytest.raises(DataError, match=rf"{name}.json is not a tokenizer.json"):
      load_tokenizer(str(tmp_path / f"{name}.json"))
  with pytest.raises(
    DataError, match=r"is a folder without tokenizer.json, and without vocab.json"
  ):
    load_tokenizer(str(tmp_path))
  with pytest.raises(DataError, match=r"is a folder; use the tokenizer.json in it"):
    files.FileTokenizer(tmp_path)


def test_tokenizer_of_a_folder(tmp_path, bpe_folder):
  """With tokenizer.json, or with its vocabulary and merges apart."""
  expected = load_tokenizer("bpe:300", bpe_folder)
  found = load_tokenizer(str(bpe_folder))
  assert found.fingerprint == expected.fingerprint and found.spec == str(bpe_folder)
  model = json.loads((bpe_folder / "tokenizer.json").read_text())["model"]
  (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
  merges = (pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
  (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
  apart = load_tokenizer(str(tmp_path))
  assert (apart.vocab_size, apart.end_of_text) == (300, expected.end_of_text)
  assert all(apart.encode(text).tolist() == expected.encode(text).tolist() for text in TEXTS)
  assert all(apart.decode(apart.encode(text)) == text for text in TEXTS)
  (tmp_path / "vocab.json").write_text("{")
  with pytest.raises(DataError, match=r"vocab.json and .*merges.txt are no BPE"):
    load_tokenizer(str(tmp_path))


def test_tokenizer_end_of_text_named(tmp_path, bpe_folder):
  raw = (bpe_folder / "tokenizer.json").read_bytes()
  (tmp_path / "tokenizer.json").write_bytes(raw)
  usual, spec = load_tokenizer(str(tmp_path)), str(tmp_path)
  named = load_tokenizer(spec, end_of_text="Z")
  assert named.end_of_text == usual.encode("Z")[0] != usual.end_of_text
  assert named.fingerprint != usual.fingerprint
  same = load_tokenizer(spec, end_of_text="<|endoftext|>")
  assert same.fingerprint == usual.fingerprint
  for end in ("Z", {"content": "Z"}):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    assert load_tokenizer(spec).fingerprint == named.fingerprint
  assert load_tokenizer(spec, end_of_text="<|endoftext|>").fingerprint == usual.fingerprint
  with pytest.raises(DataError, match="has no token '<none>' to end a text"):
    load_tokenizer(spec, end_of_text="<none>")
  (tmp_path / "tokenizer_config.json").write_text("[")
  with pytest.raises(DataError, match=r"tokenizer_config.json is unusable: .*data.end_of_text"):
    load_tokenizer(spec)


def test_tokenizer_file_without_end_of_text_named(tmp_path, bpe_folder):
  raw = (bpe_folder / "tokenizer.json").read_text()
  (tmp_path / "a.json").write_text(raw.replace("<|endoftext|>", "<stop>"))
  with pytest.raises(DataError, match=r"no end-of-text token; none of <\|endoftext"):
    load_tokenizer(str(tmp_path / "a.json"))
  (tmp_path / "a.json").write_text(raw.replace("<|endoftext|>", "</s>"))
  assert load_tokenizer(str(tmp_path / "a.json")).end_of_text == 0


def test_tokenizer_file_truncation_and_padding_disabled(tmp_path, bpe_folder):
  settings = json.loads((bpe_folder / "tokenizer.json").read_text())
  settings["truncation"] = {
    "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0
  }  # fmt: skip
  settings["padding"] = {
    "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
    "pad_type_id": 0, "pad_token": "<|endoftext|>"
  }  # fmt: skip
  settings["post_processor"] = {
    "type": "TemplateProcessing",
    "single": [
      {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
      {"Sequence": {"id": "A", "type_id": 0}}
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {
      "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    },
  }  # fmt: skip
  (tmp_path / "a.json").write_text(json.dumps(settings))
  plain, other = load_tokenizer("bpe:300", bpe_folder), load_tokenizer(str(tmp_path / "a.json"))
  assert [other.encode(text).tolist() for text in TEXTS] == [
    plain.encode(text).tolist() for text in TEXTS
  ]


def odd_text(rng, length):
  alphabet = ["\n", "\n\n", " ", "  ", "\t", "\r", "\u00a0", "\u3000", "word", "1", "'s", "don't",
              "\u00e9", "e\u0301", "<|endoftext|>", "   x", "!?", "\U0001f600"]  # fmt: skip
  return "".join(rng.choice(alphabet, length))


def check_that_pieces_are_the_whole(tokenizer, monkeypatch):
  cuts = 0
  for seed in range(40):
    text = odd_text(np.random.default_rng(seed), 300)
    monkeypatch.setattr(files, "PIECE", 1 << 30)
    whole = tokenizer.encode(text)
    monkeypatch.setattr(files, "PIECE", 5)
    pieces = tokenizer.pieces(text)
    assert "".join(pieces) == text
    cuts += len(pieces) - 1
    assert tokenizer.encode(text).tolist() == whole.tolist()
  return cuts


def test_tokenizer_long_text_pieces_exact(bpe_folder, monkeypatch):
  tokenizer = load_tokenizer("bpe:300", bpe_folder)
  assert check_that_pieces_are_the_whole(tokenizer, monkeypatch) > 100


def added(id, content, *, lstrip=False, rstrip=False):
  return {
    "id": id, "content": content, "special": False, "normalized": False, "single_word": False,
    "lstrip": lstrip, "rstrip": rstrip,
  }  # fmt: skip


@pytest.mark.parametrize(
  "change",
  [
    {"pre_tokenizer": None},
    {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}},
    {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                       "use_regex": False}},
    {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
    {"added_tokens": [added(0, "<|endoftext|>"), added(300, "d\nw")]},
    {"added_tokens": [added(0, "<|endoftext|>"), added(300, "word", lstrip=True)]},
    {"added_tokens": [added(0, "<|endoftext|>"), added(300, "word", rstrip=True)]},
  ],
  ids=["no words", "prefix space", "no regex", "strip", "newline inside", "lstrip", "rstrip"],
)  # fmt: skip
def test_tokenizer_unsafe_split_avoided(tmp_path, bpe_folder, change, monkeypatch):
  settings = json.loads((bpe_folder / "tokenizer.json").read_text())
  (tmp_path / "a.json").write_text(json.dumps(settings | change))
  assert check_that_pieces_are_the_whole(load_tokenizer(str(tmp_path / "a.json")), monkeypatch) == 0


def test_neox_tokenizer_properties(neox, monkeypatch):
  assert (neox.vocab_size, neox.end_of_text) == (50_277, 0)
  for text in TEXTS:
    assert neox.decode(neox.encode(text)) == text
    assert neox.end_of_text not in neox.encode(text)
  assert check_that_pieces_are_the_whole(neox, monkeypatch) > 100


def test_neox_tokenizer_ids_match_other_program(neox, given):
  folder = given("binidx")
  for name, wanted in json.loads((folder / "expected.json").read_text())["sets"].items():
    data = IndexedDataset(folder / name)
    for sample in wanted["samples"]:
      ids = neox.encode(sample["text_start"])
      assert ids[:-1].tolist() == data.sequence(sample["sequence"])[: len(ids) - 1].tolist()
    for i in range(data.num_sequences):
      ids = data.sequence(i)
      assert ids[-1] == neox.end_of_text
      assert neox.encode(neox.decode(ids)).tolist() == ids[:-1].tolist()


def test_tokenizer_library_panic_raises_data_error(bpe_folder, tmp_path):
  values = json.loads((bpe_folder / "tokenizer.json").read_text())
  for name, change in (
    ("panics", {"model": values["model"] | {"continuing_subword_prefix": "x" * 1000}}),
    ("odd", {"added_tokens": [], "normalizer": [], "pre_tokenizer": []}),
  ):
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(values | change))
    with pytest.raises(DataError, match=rf"{name}\.json is not a tokenizer\.json"):
      load_tokenizer(str(path))
