"""Numbers, names and files beyond any use: an error in one line, before memory or time is spent."""

import gzip
import importlib
import json
import lzma
import threading
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lnssm_jax.generate import SamplingOptions
from lnssm_jax.pretrained import DataError, tokenizer_json, tokenizers
from lnssm_jax.pretrained.manifest import MANIFEST, ExportError, read_manifest
from train import trainer
from train.checkpoint import store
from train.checkpoint.store import Checkpoints, StructureError
from train.cli.main import main
from train.cluster import distributed
from train.cluster.device_mesh import make_mesh
from train.config import ConfigError, apply_overrides
from train.data import compressed, sources
from train.data.tokenizers import load_tokenizer, train_bpe
from train.logging.throughput import Clock
from train.runs.run_folder import claim


@pytest.mark.parametrize(
  ("assignment", "message"),
  [
    ("model.dim=1000000000", "model.dim=1000000000 must be at most 1048576"),
    ("model.num_layers=1000000000", "model.num_layers=1000000000 must be at most 65536"),
    ("global_batch=1000000000", r"global_batch=1000000000 times seq_len=32 must be below 2\*\*31"),
    ("seq_len=1000000000", r"seq_len=1000000000 must be below 2\*\*31"),
    ("steps=10000000000", "steps=10000000000 must be at most 2147483647"),
    ("seed=99999999999999999999", r"seed=99999999999999999999 must be in \[0, 2\*\*32\)"),
    ("model.mixer=" + "gla," * 2000, "number of layers in model.mixer=2000 must be at most 1024"),
    ("run_dir=a\0b", "run_dir='a.x00b' has a null character"),
    ("run_dir=" + "x" * 300, "run_dir='x+'... is too long for a path: it has 300 bytes"),
    ("data.folder=" + "x/" * 3000, "data.folder='.*'... is too long for a path: it has 6000"),
    ("data.tokenizer=" + "x" * 300, "data.tokenizer='x+'... is too long"),
    ("data.sources.train=a\0", r"data.sources.train='a\\x00' has a null character"),
    ("compile_cache=" + "x" * 300, "compile_cache='x+'... is too long"),
    ("run_dir=hf://b/run", "run_dir='hf://b/run' is the address of a bucket"),
    ("data.folder=az://b/x", "data.folder='az://b/x' is the address of a bucket"),
    ("compile_cache=gs://b/x", "compile_cache='gs://b/x' is the address of a bucket"),
    ("data.train=" + "x" * 300, "data.train holds 'x+, which is not a plain file name"),
  ],
  ids=lambda text: text[:20],
)
def test_setting_beyond_its_limit_rejected(assignment, message, tiny):
  with pytest.raises(ConfigError, match=message) as caught:
    apply_overrides(tiny(), [assignment])
  assert len(str(caught.value)) < 400


@pytest.mark.parametrize("text", ["gla,lrn", "('gla', 'lrn')", '["gla", "lrn"]'])
def test_pattern_of_mixers_set_on_the_command_line(text, tiny):
  cfg = apply_overrides(tiny(), [f"model.mixer={text}", "model.num_layers=2"])
  assert cfg.model.mixer == ("gla", "lrn")
  assert apply_overrides(tiny(), ["model.mixer=gla"]).model.mixer == "gla"


@pytest.mark.parametrize(
  "arguments",
  ["export x --out az://b/x", "inspect x --html URL", "sweep x --out URL", "plot URL",
   "generate --run-dir x --prompts x --output URL", "fit --config URL", "doctor --config URL",
   "fit --run-dir az://b/x", "import hf://b/x --config x",
   "tokenize --input x --output az://b/x --tokenizer bytes", "task cost x --json URL"],
)  # fmt: skip
def test_address_of_a_bucket_on_the_command_line_is_rejected(
  arguments, capsys, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(SystemExit) as caught:
    main(arguments.replace("URL", "gs://b/x").split())
  err = capsys.readouterr().err
  assert caught.value.code == 2 and "is the address of a bucket" in err and err.count("\n") == 1
  assert "://b/x" in err
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
  "arguments",
  ["inspect LONG", "export x --out LONG", "generate --run-dir LONG", "verify LONG",
   "fit --config LONG", "tokenize --input LONG --output x --tokenizer bytes"],
)  # fmt: skip
def test_overlong_path_on_the_command_line_is_one_line(arguments, capsys):
  assert main(arguments.replace("LONG", "x" * 5000).split()) == 2
  err = capsys.readouterr().err
  assert err.count("\n") == 1 and len(err) < 500


def test_seed_of_sampling_limited():
  for seed in (-1, 2**32, 2**64):
    with pytest.raises(ValueError, match=rf"seed={seed} must be in \[0, 2\*\*32\)"):
      SamplingOptions(max_tokens=1, seed=seed)


def test_rows_of_a_huge_batch_found_without_memory():
  mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
  begin = time.process_time()
  rows = distributed.local_rows(NamedSharding(mesh, PartitionSpec("data", None)), 10**12)
  assert rows == range(10**12)
  assert time.process_time() - begin < 1


def test_pattern_of_an_export_limited(tmp_path):
  values = {"format": "lnssm_jax model, version 2", "model": {"mixer": ["gla"] * 2000}, "step": 1}
  values |= {"tokenizer": {"spec": "bytes", "fingerprint": "bytes"}, "tensors": {}}
  text = json.dumps(values | {"sha256": "x"})
  (tmp_path / MANIFEST).write_text(text)
  with pytest.raises(ExportError, match="has changed"):
    read_manifest(tmp_path)
  digest = tokenizers.hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
  (tmp_path / MANIFEST).write_text(json.dumps(values | {"sha256": digest}))
  with pytest.raises(ExportError, match=r"model\.mixer has 2000 layers; 1024 are the most"):
    read_manifest(tmp_path)


def test_number_of_many_digits_in_a_row_named(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_text('{"text": "x"}\n{"text": "y", "n": ' + "9" * 5000 + "}\n")
  with pytest.raises(DataError, match=r"a\.jsonl, line 2: a number has 5,000 digits"):
    list(sources.read_documents(str(path)))


@pytest.mark.parametrize("name", ["a.txt.xz", "a.jsonl.xz", "a.jsonl.gz", "a.jsonl.zst"])
def test_compressed_bomb_stopped_at_its_limit(name, tmp_path, monkeypatch):
  monkeypatch.setattr(compressed, "MAX_ROW", 1 << 21)
  path, row = tmp_path / name, b'{"text": "' + b"x" * 1000 + b'"}\n'
  modules = {".gz": gzip, ".xz": lzma, ".zst": importlib.import_module(compressed.ZSTD)}
  with modules[path.suffix].open(path, "wb") as file:
    for _ in range(3000):
      file.write(row)
  assert path.stat().st_size * compressed.MAX_EXPANSION < 3000 * len(row)
  with pytest.raises(DataError, match=rf"\{path.suffix} expands to more than 200 times its size"):
    list(sources.read_documents(str(path)))
  monkeypatch.setattr(compressed, "MAX_EXPANSION", 10**6)
  assert sum(map(len, sources.read_documents(str(path)))) >= 3_000_000


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 20}
GROWING = {
  "replacements": {"type": "Sequence", "normalizers": [REPLACE, REPLACE]},
  "expression": {**REPLACE, "pattern": {"Regex": "."}, "content": "a" * 300},
  "prepended": {"type": "Prepend", "prepend": "a" * 300},
}


@pytest.mark.parametrize("name", GROWING)
def test_tokenizer_that_makes_texts_far_longer_rejected(name, tmp_path):
  train_bpe("bpe:260", tmp_path, ["the river the river over the stones"] * 3)
  path = tmp_path / "tokenizer.json"
  settings = json.loads(path.read_text())
  mild = {"type": "Sequence", "normalizers": [{"type": "NFC"}, {**REPLACE, "content": "bb"}]}
  path.write_text(json.dumps(settings | {"normalizer": mild}))
  assert load_tokenizer(str(path)).vocab_size == 260
  path.write_text(json.dumps(settings | {"normalizer": GROWING[name]}))
  with pytest.raises(DataError, match=r"normalizer can make a text \S+ times longer, more than"):
    load_tokenizer(str(path))


def test_tokenizer_of_a_decoder_or_charsmap_that_grows_rejected():
  steps = {"type": "Sequence", "decoders": [REPLACE, REPLACE]}
  with pytest.raises(ValueError, match="its decoder can make a text 400 times longer"):
    tokenizer_json.check_size({"decoder": steps})
  charsmap = (4).to_bytes(4, "little") + b"trie" + b"short\0" + b"x" * 300 + b"\0"
  encoded = tokenizer_json.base64.b64encode(charsmap).decode()
  with pytest.raises(ValueError, match="its normalizer can make a text 300 times longer"):
    step = {"type": "Precompiled", "precompiled_charsmap": encoded}
    tokenizer_json.check_size({"normalizer": step})


def test_throughput_of_steps_seen_to_finish_at_once_is_finite():
  clock = Clock(tokens_per_step=100)
  start = clock._since
  clock.tick(start + 1)
  clock.waited(0.5)
  assert clock.read() == (pytest.approx(100), pytest.approx(0.5))
  clock.waited(0.25)
  clock.tick(start + 0.9)  # ready before the reading of the step before it ended
  assert clock.read() == (pytest.approx(100), pytest.approx(0.5))
  clock.tick(start + 2)
  assert clock.read() == (pytest.approx(200), pytest.approx(0.25))


def test_entry_of_a_state_added_to_and_dropped_from_a_checkpoint(tmp_path):
  """As the statistics of spikes, when `skip_spikes` is switched on or off."""
  plain = {"params": {"w": jnp.ones(3)}, "step": jnp.int32(4)}
  more = plain | {"spikes": {"mean": jnp.full(2, 7.0)}}
  describe = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
  initial = {"spikes": {"mean": jnp.zeros(2)}}

  def restored(saved, wanted, optional):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
      checkpoints.save(int(saved["step"]), saved, {})
      checkpoints.wait()
      return checkpoints.restore(jax.tree.map(describe, wanted), optional)[0]

  chex.assert_trees_all_equal(restored(plain, more, initial), plain | initial)
  chex.assert_trees_all_equal(
    restored(more | {"step": jnp.int32(5)}, more, initial)["spikes"], more["spikes"]
  )
  dropped = restored(more | {"step": jnp.int32(6)}, plain, initial)
  chex.assert_trees_all_equal(dropped, plain | {"step": jnp.int32(6)})
  with pytest.raises(StructureError, match="spikes/mean: missing in the checkpoint"):
    restored(plain | {"step": jnp.int32(7)}, more, None)


def test_run_that_exists_may_switch_skip_spikes(tiny):
  asked = []

  class Saved:
    def restore(self, abstract, optional):
      asked.append(jax.tree.map(lambda x: (x.shape, x.dtype), optional["spikes"]))
      assert jax.tree.structure(abstract["spikes"]) == jax.tree.structure(optional["spikes"])
      return abstract, {"data_position": 3}

  cfg = tiny(skip_spikes=6.0)
  with claim(cfg) as run:
    assert trainer._begin(cfg, make_mesh(cfg), Saved(), run, None)[1] == 3
  assert len(asked) == 1


def test_save_that_takes_long_is_said(tmp_path, monkeypatch):
  monkeypatch.setattr(store, "_PATIENCE", 0.05)
  said, twice = [], threading.Event()

  def say(line):
    said.append(line)
    if len(said) == 2:
      twice.set()

  with Checkpoints(tmp_path, keep=1, say=say) as checkpoints:
    checkpoints._pending = checkpoints._thread.submit(twice.wait, 30)
    checkpoints.wait()
  assert len(said) >= 2 and "training waits for the disk" in said[0]
