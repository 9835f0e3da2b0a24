"""RWKV as its author publishes it: one .pth, read without torch and without running its pickle."""

import collections
import pickle
import sys
import types
import zipfile

import jax
import ml_dtypes
import numpy as np
import pytest

import lnssm_jax
from lnssm_jax.files.reading import DataError
from lnssm_jax.models.settings import params_of
from lnssm_jax.pretrained import ExportError, hugging_face, saving, torch_files
from lnssm_jax.pretrained.rwkv_tokenizer import WorldTokenizer
from tests.pretrained.published import recorded, write
from train.config import published_model, to_dict
from train.data import load_tokenizer

# {part of a tensor's name in fla's layout: of the author's, whether it is transposed}
NAMES = {
  "model.embeddings.weight": "emb.weight",
  "lm_head.weight": "head.weight",
  "model.norm.": "ln_out.",
  "model.layers.": "blocks.",
  ".pre_norm.": ".ln0.",
  ".attn_norm.": ".ln1.",
  ".ffn_norm.": ".ln2.",
  ".attn.g_norm.": ".att.ln_x.",
  ".attn.r_proj.": ".att.receptance.",
  ".attn.k_proj.": ".att.key.",
  ".attn.v_proj.": ".att.value.",
  ".attn.o_proj.": ".att.output.",
  ".attn.": ".att.",
} | {
  f".{x}_lora.lora.{number}": f".{x}{n}" for x in "wavg" for number, n in (("0.weight", 1),
  ("2.weight", 2), ("2.bias", 0))
}  # fmt: skip


def of_author(tensors):
  """The tensors of fla's RWKV-7 as the author's file has them."""
  found = {}
  for name, x in tensors.items():
    new = name
    for old, today in NAMES.items():
      new = new.replace(old, today)
    low_rank = "_lora" in name
    found[new] = x[None, None] if low_rank and x.ndim == 1 else x.T if low_rank else x
    if new.endswith((".k_k", ".k_a", "ffn.x_k")):
      found[new] = x.reshape(1, 1, -1)
  return found


class Storage:
  """The place of numbers in a pickle of torch."""

  def __init__(self, kind, key, size):
    self.pid = ("storage", kind, key, "cpu", size)


class Pickler(pickle.Pickler):
  def persistent_id(self, obj):
    return obj.pid if isinstance(obj, Storage) else None


@pytest.fixture
def torch_names(monkeypatch):
  """Functions with the names that torch has, for the pickle to mention."""
  utils, torch = types.ModuleType("torch._utils"), types.ModuleType("torch")

  def named(module, name):
    def function(*_):
      raise AssertionError("a pickle was run")

    function.__module__, function.__qualname__ = module.__name__, name
    setattr(module, name, function)
    return function

  named(utils, "_rebuild_tensor_v2")
  for name in ("FloatStorage", "BFloat16Storage"):
    named(torch, name)
  torch._utils = utils
  monkeypatch.setitem(sys.modules, "torch", torch)
  monkeypatch.setitem(sys.modules, "torch._utils", utils)
  return torch


class Call:
  """An object that is pickled as a call."""

  def __init__(self, function, *arguments):
    self.call = function, arguments

  def __reduce__(self):
    return self.call


def write_torch(path, tensors, torch, *, more=None, order="little"):
  """A file as `torch.save` writes one."""
  kinds = {"float32": torch.FloatStorage, "bfloat16": torch.BFloat16Storage}
  content, data = collections.OrderedDict(), {}
  for number, (name, x) in enumerate(tensors.items()):
    storage = Storage(kinds[str(x.dtype)], str(number), x.size)
    strides = tuple(s // x.itemsize for s in np.ascontiguousarray(x).strides)
    arguments = storage, 0, x.shape, strides, False, collections.OrderedDict()
    content[name] = Call(torch._utils._rebuild_tensor_v2, *arguments)
    data[str(number)] = np.ascontiguousarray(x).tobytes()
  content.update(more or {})
  with zipfile.ZipFile(path, "w") as archive:
    with archive.open("model/data.pkl", "w") as file:
      Pickler(file, 2).dump(content)
    for key, numbers in data.items():
      archive.writestr(f"model/data/{key}", numbers)
    archive.writestr("model/byteorder", order)
  return path


def test_rwkv7_of_its_author_is_the_model_of_flas_folder(tmp_path, torch_names):
  """Parameters bit for bit, and logits but for the norm's eps, which has no factor of the width."""
  case = "fla_rwkv7"
  tensors = {name: x.astype(np.float32) for name, x in recorded(case).tensors.items()}
  path = write_torch(tmp_path / "RWKV-x070.pth", of_author(tensors), torch_names)
  want = hugging_face.load(write(tmp_path / "fla", case, dtype=np.float32))
  got = lnssm_jax.load_model(path)
  jax.tree.map(np.testing.assert_array_equal, params_of(got.model), params_of(want.model))
  (line,) = hugging_face.differences(got.settings["model"], want.settings["model"])
  assert line.startswith("mixer_options.0.norm_eps: ")
  K = got.settings["model"]["dim"] // got.settings["model"]["num_heads"]
  assert got.settings["model"]["mixer_options"]["norm_eps"] * K == pytest.approx(64e-5)
  # A run begins from the file, and its export has no vocabulary, which is given again.
  model = published_model(path, dtype="float32", param_dtype="float32")
  assert not hugging_face.differences(to_dict(model), got.settings["model"])
  vocabulary = str(write_vocabulary(tmp_path / "vocabulary.txt"))
  tokenizer = load_tokenizer(vocabulary)
  assert isinstance(tokenizer, WorldTokenizer) and tokenizer.spec == vocabulary
  with pytest.raises(DataError, match=r"ends a text; leave out data\.end_of_text='</s>'"):
    load_tokenizer(vocabulary, end_of_text="</s>")
  saving.write(tmp_path / "out", to_dict(model), params_of(got.model), tokenizer, 0)
  with pytest.raises(ExportError, match="has no tokenizer"):
    lnssm_jax.load_model(tmp_path / "out").tokenizer  # noqa: B018
  copy = lnssm_jax.load_model(tmp_path / "out", tokenizer=vocabulary)
  assert copy.tokenizer.fingerprint == tokenizer.fingerprint


def test_rwkv6_of_its_author_is_the_model_of_flas_folder(tmp_path, torch_names):
  """Its streams are in the order w, k, v, r, g, as here; fla's begin with r."""
  case, found = "fla_rwkv6", {}
  tensors = {name: x.astype(np.float32) for name, x in recorded(case).tensors.items()}
  want = hugging_face.load(write(tmp_path / "fla", case, dtype=np.float32))
  params, layers = params_of(want.model), recorded(case).config["num_hidden_layers"]
  row = lambda x: np.asarray(x).reshape(1, 1, -1)
  for n in range(layers):
    mixer, channel = (
      jax.tree.map(lambda x, n=n: np.asarray(x[n]), params["blocks"][name])
      for name in ("mixer", "channel_mixer")
    )
    att, ffn = f"blocks.{n}.att.", f"blocks.{n}.ffn."
    found |= {f"{att}time_maa_{x}": row(mixer[f"mu_{x}"]) for x in "xwkvrg"}
    found |= {f"{ffn}time_maa_{x}": row(channel[f"mu_{x}"]) for x in "kr"}
    found |= {f"{att}time_maa_w1": mixer["mix_down_proj"]["kernel"]}
    found |= {f"{att}time_maa_w2": mixer["mix_up"], f"{att}time_decay": row(mixer["w"])}
    found |= {f"{att}time_faaaa": mixer["u"].reshape(want.settings["model"]["num_heads"], -1)}
    for number, x in enumerate(("decay_down_proj", "decay_up_proj"), 1):
      found[f"{att}time_decay_w{number}"] = mixer[x]["kernel"]
  names = {name: x for name, x in NAMES.items() if "lora" not in name and name != ".attn."}
  names |= {".attn.g_proj.linear.": ".att.gate.", ".linear.weight": ".weight"}
  for name, x in tensors.items():
    for old, today in names.items():
      name = name.replace(old, today)
    kept = name.endswith((".weight", ".bias")) and "_proj" not in name
    found |= {name: x} if kept and name.count(".") < 5 else {}
  got = lnssm_jax.load_model(write_torch(tmp_path / "RWKV-x060.pth", found, torch_names))
  jax.tree.map(np.testing.assert_array_equal, params_of(got.model), params)
  options = got.settings["model"]["mixer_options"]
  assert options["norm_eps"] == 1e-5  # after a division by 8: 64e-5 without


def test_file_of_torch_has_the_numbers_of_each_dtype(tmp_path, torch_names):
  tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, ml_dtypes.bfloat16)}
  found = torch_files.Tensors(write_torch(tmp_path / "x.pth", tensors, torch_names))
  assert {name: found.kind(name) for name in found} == {
    "a": ("float32", (2, 3)),
    "b": ("bfloat16", (3,)),
  }
  for name, x in tensors.items():
    np.testing.assert_array_equal(found.mapped(name), x)


@pytest.mark.parametrize(
  ("more", "message"),
  [
    ({"x": Call(print, "run")}, r"it calls \w+\.print, which is no part of a tensor"),
    ({"x": 3}, "other things than tensors"),
  ],
)
def test_file_of_torch_that_calls_or_holds_other_things_raises(
  tmp_path, more, message, torch_names
):
  tensors = {"emb.weight": np.ones((2, 2), np.float32)}
  path = write_torch(tmp_path / "x.pth", tensors, torch_names, more=more)
  with pytest.raises(ExportError, match=message):
    hugging_face.load(path)


def test_file_of_torch_of_another_model_or_of_a_larger_tensor_raises(tmp_path, torch_names):
  tensors = {"emb.weight": np.ones((2, 2), np.float32)}
  for name in ("head.weight", "ln_out.weight"):
    tensors[name] = tensors["emb.weight"]
  tensors["blocks.0.ffn.key.weight"] = tensors["emb.weight"]
  path = write_torch(tmp_path / "x.pth", tensors, torch_names)
  with pytest.raises(ExportError, match=r"neither blocks.0.att.r_k \(RWKV-7\)"):
    hugging_face.load(path)
  storage = Storage(torch_names.FloatStorage, "0", 4)
  for begin, strides, message in (
    (1, (2, 1), "larger than its storage"),
    (0, (1, 2), "is a view of another one"),
  ):
    arguments = storage, begin, (2, 2), strides, False, collections.OrderedDict()
    more = {"x": Call(torch_names._utils._rebuild_tensor_v2, *arguments)}
    write_torch(path, tensors, torch_names, more=more)
    with pytest.raises(ExportError, match=message):
      hugging_face.load(path)
  write_torch(path, tensors, torch_names, order="big")
  with pytest.raises(ExportError, match="not little endian"):
    hugging_face.load(path)


# Those of the test; a byte b that is no text is written as the author's file has it.
WORDS = ["in", "int", " in", "é", "éa", b"\xe4\xbd", "你", "\n\n", " \t", "'", '"', "\\"]


def write_vocabulary(path, words=WORDS):
  """Ids 1 to 256 are the bytes, as in the author's file."""
  ascii_or_byte = lambda n: chr(n) if n < 128 else bytes([n])
  entries = [*map(ascii_or_byte, range(256)), *(w for w in words if len(w) > 1 or ord(w) > 127)]
  size = lambda x: len(x.encode() if isinstance(x, str) else x)
  lines = [f"{n} {x!r} {size(x)}" for n, x in enumerate(entries, 1)]
  path.write_text("\n".join(lines) + "\n", encoding="utf-8")
  return path


def test_world_tokenizer_takes_the_longest_token_of_any_bytes(tmp_path):
  """Against a search over the whole vocabulary; of bytes that are no text, and of texts."""
  found = WorldTokenizer(write_vocabulary(tmp_path / "vocabulary.txt"))
  tokens = {found.decode_bytes([i]): i for i in range(1, found.vocab_size)}
  rng = np.random.default_rng(0)
  letters = [
    *(x.encode() if isinstance(x, str) else x for x in WORDS),
    *(bytes([n]) for n in range(256)),
  ]
  for _ in range(50):
    data = b"".join(letters[i] for i in rng.integers(0, 40, rng.integers(0, 30)))
    want, rest = [], data
    while rest:
      longest = max((x for x in tokens if rest.startswith(x)), key=len)
      want.append(tokens[longest])
      rest = rest[len(longest) :]
    assert found.encode_bytes(data).tolist() == want
    assert found.decode_bytes(want) == data
  ids = found.encode("int éa 你")
  assert found.decode(ids) == "int éa 你" and len(ids) == 5
  assert found.decode([*ids[:-1], tokens[b"\xe4\xbd"], 0]) == "int éa \ufffd"
  assert found.is_byte(tokens[b"\xe4\xbd"]) and not found.is_byte(tokens["你".encode()])
  (ids, start), (_, both) = found.encode_continuations([(" in", "t"), ("i", "nt")])
  assert (ids.tolist(), start, both) == ([tokens[b" in"], tokens[b"t"]], 1, 0)


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("300 __import__('os') 2", "must be a text or bytes"),
    ("300 'ab'.upper() 2", "line 266"),
    ("300 'ab' 3", "it has 2 bytes"),
    ("0 'ab' 2", "ids are 1 to"),
    ("300 'in' 2", "that of an earlier line"),
    ("300 '" + "a" * 5000 + "' 5000", "an id, a literal and a length"),
    ("three 'ab' 2", "an id, a literal and a length"),
  ],
)
def test_world_vocabulary_with_a_wrong_line_is_named(line, message, tmp_path):
  path = write_vocabulary(tmp_path / "vocabulary.txt")
  path.write_text(path.read_text() + line + "\n")
  with pytest.raises(DataError, match=message):
    WorldTokenizer(path)


def test_world_vocabulary_without_a_byte_is_rejected(tmp_path):
  path = write_vocabulary(tmp_path / "vocabulary.txt")
  path.write_text("\n".join(path.read_text().splitlines()[1:]))
  with pytest.raises(DataError, match="no token for the byte 0"):
    WorldTokenizer(path)


@pytest.mark.slow
def test_model_of_the_author_generates_and_scores_with_its_vocabulary(tmp_path, torch_names):
  case, size = "fla_rwkv7", 300
  tensors = {name: x.astype(np.float32) for name, x in recorded(case).tensors.items()}
  for name in ("model.embeddings.weight", "lm_head.weight"):
    tensors[name] = np.resize(tensors[name], (size, tensors[name].shape[1]))
  path = write_torch(tmp_path / "RWKV-x070.pth", of_author(tensors), torch_names)
  vocabulary = write_vocabulary(tmp_path / "vocabulary.txt")
  loaded = lnssm_jax.load_model(path, tokenizer=vocabulary)
  assert loaded.stop_tokens == (0,)
  text = loaded.generate("int éa", max_tokens=4, temperature=0)
  assert text == "".join(loaded.stream("int éa", loaded.options(max_tokens=4, temperature=0)))
  score = loaded.score("a 你", context="int é")
  assert loaded.tokenizer.decode(score.tokens) == "éa 你"  # one token has both
  with pytest.raises(ValueError, match=r"give it again: load_model\(folder, tokenizer="):
    lnssm_jax.save_model(tmp_path / "copy", loaded.model, loaded.tokenizer)
  lnssm_jax.save_model(tmp_path / "copy", loaded.model)
  copy = lnssm_jax.load_model(tmp_path / "copy", tokenizer=vocabulary)
  assert copy.generate("int éa", max_tokens=4, temperature=0) == text
