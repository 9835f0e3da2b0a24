"""Models outside of their run: loaded on one device, exported, imported, damaged."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import lnssm_jax
import train
from lnssm_jax import models
from lnssm_jax.files.reading import digest_of
from lnssm_jax.pretrained import exports
from tests import devices
from train import config, trainer
from train.checkpoint import step_folders, store
from train.cli.main import main
from train.cluster.device_mesh import make_mesh
from train.data import DataError
from train.data.tokenizers import load_tokenizer, train_bpe
from train.runs import export
from train.runs.importing import import_model
from train.runs.run_folder import RunFolder, RunFolderError
from train.step.model import params_of
from train.step.state import init_state

ON_FOUR = """
import sys
import jax
import numpy as np
from train import config, trainer
from train.checkpoint.store import Checkpoints
from train.cluster.device_mesh import make_mesh
from train.runs.run_folder import claim
from train.step.state import init_state
cfg, out, trained = config.load_config(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
if trained:
  state = trainer.fit(cfg).state
else:
  state = init_state(cfg, make_mesh(cfg))
  run = claim(cfg)
  run.write_config(cfg)
  with Checkpoints(run.checkpoints, keep=1) as checkpoints:
    checkpoints.save(2, state, {"data_position": 2, "data": None})
    checkpoints.wait()
leaves = jax.tree.leaves(state["params"])
assert max(len(x.sharding.device_set) for x in leaves) == 4
np.savez(out, *[np.asarray(x) for x in leaves])
"""
MODEL = config.Model(dim=16, num_layers=2, num_heads=2, vocab_size=257, param_dtype="bfloat16")


def random_params(model, seed=0):
  rng = np.random.default_rng(seed)
  abstract = exports.abstract_params(config.to_dict(model))
  return jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(x.dtype), abstract)


def same_bits(a, b):
  pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  return all(
    x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs
  )


@pytest.fixture
def exported(tmp_path):
  """Folder of an exported model of 2 layers, and its parameters."""
  params = random_params(MODEL)
  export.write(tmp_path / "exported", MODEL, params, load_tokenizer("bytes"), 7)
  return tmp_path / "exported", params


@pytest.mark.parametrize("trained", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_load_model_from_four_devices_on_one(trained, tiny, config_file, command, tmp_path):
  options = {"steps": 2, "data__validation": (), "data__sources": {}}
  trainer.prepare(tiny().data)
  cfg = tiny(mesh__data=2, mesh__fsdp=2, **options)
  arguments = (config_file(cfg), str(tmp_path / "params.npz"), str(trained))
  process = command("-c", ON_FOUR, *arguments, **devices.flags(4))
  _, errors = process.communicate(timeout=300)
  assert process.returncode == 0, errors
  assert jax.device_count() == 1
  # The optimizer state need not be readable or exist.
  for file in (tmp_path / "run/checkpoints/2/optimizer").rglob("d/*"):
    file.unlink()
  loaded = train.load_model(tmp_path / "run")
  with np.load(tmp_path / "params.npz") as saved:
    assert same_bits(params_of(loaded.model), [saved[name] for name in saved.files])
  assert (loaded.step, loaded.settings) == (2, config.to_dict(cfg))
  assert loaded.tokenizer.spec == "bytes"

  # From there to safetensors and back, and to another run.
  assert main(["export", cfg.run_dir, "--out", str(tmp_path / "out")]) == 0
  again = train.load_model(tmp_path / "out")
  assert same_bits(params_of(again.model), params_of(loaded.model)) and again.step == 2
  more = tiny(run_dir=str(tmp_path / "more"), **options)
  path = config_file(more, "more.py")
  assert main(["import", str(tmp_path / "out"), "--config", path]) == 0
  assert step_folders.steps_in(tmp_path / "more/checkpoints") == [0]
  run = RunFolder(more.run_dir)
  assert run.load_config() == more
  mesh = make_mesh(more)
  with store.Checkpoints(run.checkpoints, keep=1) as checkpoints:
    inputs = {"tokenizer": loaded.tokenizer.fingerprint, "data": {"train": {"sha256": "any"}}}
    state, step, _ = trainer._begin(more, mesh, checkpoints, run, inputs)
  assert step == 0 and same_bits(state["params"], params_of(loaded.model))
  fresh = init_state(more, mesh)
  assert same_bits([state["opt_state"], state["step"]], [fresh["opt_state"], fresh["step"]])
  assert main(["import", str(tmp_path / "out"), "--config", path]) == 2  # exists already
  if trained:
    result = trainer.fit(more)
    first, *_ = run.read_rows()
    assert result.step == 2 and first["loss"] < RunFolder(cfg.run_dir).read_rows()[0]["loss"]


@pytest.mark.slow
def test_export_round_trip_exact(exported):
  folder, params = exported
  assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "model.safetensors"]
  manifest, arrays = exports.read(folder)
  assert same_bits(arrays, params)
  assert (manifest.model, manifest.step) == (config.to_dict(MODEL), 7)
  loaded = train.load_model(folder)
  assert same_bits(params_of(loaded.model), params)
  assert loaded.model(np.zeros((1, 3), np.int32))[0].shape == (1, 3, 257)
  # Any reader of safetensors gets the parameters by name.
  tensors = safetensors.numpy.load_file(folder / exports.TENSORS)
  assert tensors["head.kernel"].shape == (16, 257)
  with pytest.raises(exports.ExportError, match="of step 7, not of step 6"):
    train.load_model(folder, step=6)


def test_export_has_the_settings_and_last_metrics_of_a_run_without_paths(tiny, tmp_path):
  rows = [
    {"kind": kind, "step": step, "loss": float(step), **({"set": name} if name else {})}
    for step in (1, 2)
    for kind, name in (("train", None), ("eval", "a"), ("eval", "b"))
  ]
  cfg = tiny(watch=("tensorboard",), compile_cache=str(tmp_path / "programs"))
  how = {"run": cfg, "metrics": rows}
  export.write(tmp_path / "out", MODEL, random_params(MODEL), load_tokenizer("bytes"), 2, **how)
  manifest = exports.read_manifest(tmp_path / "out")
  assert manifest.metrics == rows[3:]
  settings = config.to_dict(cfg)
  assert manifest.settings["data"] == {"train": ["train"], "validation": ["validation"]}
  assert manifest.settings["optimizer"] == settings["optimizer"]
  left_out = settings.keys() - manifest.settings.keys()
  assert left_out == {"model", "run_dir", "compile_cache", "mesh", "watch"}
  text = (tmp_path / "out" / exports.MANIFEST).read_text()
  assert str(tmp_path) not in text and cfg.data.folder not in text


def test_export_of_a_run_takes_the_step_or_the_average_that_is_asked_for(tiny, monkeypatch):
  cfg, asked = tiny(), []
  RunFolder(cfg.run_dir).path.mkdir()
  RunFolder(cfg.run_dir).write_config(cfg)

  def of_run(cfg, **options):
    asked.append(options)
    raise FileNotFoundError

  monkeypatch.setattr(export.loading, "of_run", of_run)
  for options in ({"step": 3, "ema": False}, {"step": None, "ema": True}):
    with pytest.raises(FileNotFoundError):
      export.export_run(cfg.run_dir, "nowhere", **options)
  assert asked == [{"step": 3, "ema": False}, {"step": None, "ema": True}]


@pytest.mark.slow
def test_export_includes_tokenizer(tmp_path):
  tokenizer = train_bpe("bpe:260", tmp_path, ["a b a b a b c c c"])
  model = config.Model(dim=16, num_layers=1, num_heads=2, vocab_size=260)
  export.write(tmp_path / "out", model, random_params(model), tokenizer, 1)
  found = train.load_model(tmp_path / "out").tokenizer
  assert found.fingerprint == tokenizer.fingerprint
  with (tmp_path / "out" / exports.TOKENIZER).open("a") as file:
    file.write(" ")
  with pytest.raises(exports.ExportError, match=r"tokenizer\.json has changed"):
    _ = train.load_model(tmp_path / "out").tokenizer
  (tmp_path / "out" / exports.TOKENIZER).write_text("{}")
  with pytest.raises(DataError, match=r"is not a tokenizer\.json"):
    _ = train.load_model(tmp_path / "out").tokenizer


@pytest.mark.slow
def test_export_failed_leaves_nothing(tmp_path, exported, monkeypatch):
  folder, params = exported
  with pytest.raises(exports.ExportError, match="exists already"):
    export.write(folder, MODEL, params, load_tokenizer("bytes"), 8)
  wrong = random_params(config.Model(dim=16, num_layers=1, num_heads=2, vocab_size=257))
  with pytest.raises(exports.ExportError, match="does not match the model:\n  blocks"):
    export.write(tmp_path / "new", MODEL, wrong, load_tokenizer("bytes"), 8)

  def full(arrays, path, **_):
    path.write_bytes(b"half")
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(safetensors.numpy, "save_file", full)
  with pytest.raises(OSError, match="No space"):
    export.write(tmp_path / "new", MODEL, params, load_tokenizer("bytes"), 8)
  assert [path.name for path in tmp_path.iterdir()] == ["exported"]


def rewrite(folder, change, honest=True):
  """Changes the manifest, with a matching digest if `honest`."""
  path = folder / exports.MANIFEST
  values = json.loads(path.read_text())
  change(values)
  if honest:
    values.pop("sha256")
    values["sha256"] = digest_of(values)
  path.write_text(json.dumps(values))


@pytest.mark.parametrize(
  ("change", "honest", "message"),
  [
    (lambda v: v.update(step=8), False, "has changed since it was written"),
    (lambda v: v.update(format="another"), True, "has format 'another'"),
    (lambda v: v.update(step="7"), True, "step='7' must be a number"),
    (lambda v: v.update(model=[]), True, "cannot be used"),
    (lambda v: v["model"].update(dim="16"), True, r"model\.dim='16' is not an integer"),
    (lambda v: v["model"].update(num_layers=10**9), True, "is more than its tensors have elements"),
    (lambda v: v["model"].update(mixer="../x"), True, "no model can be built"),
    (lambda v: v["model"].update(num_layers=3), True, r"the model needs \('bfloat16', \(3, "),
    (lambda v: v["tensors"].pop("norm.scale"), True, "norm.scale: found nothing"),
    (lambda v: v["tensors"].update({"../x": v["tensors"]["norm.scale"]}), True, r"\.\./x: found"),
    (lambda v: v["tensors"]["norm.scale"].update(shape=[2**60]), True, "is not a shape"),
    (lambda v: v["tensors"]["norm.scale"].pop("dtype"), True, "cannot be used .KeyError: 'dtype'"),
    (lambda v: v["tensors"]["norm.scale"].update(dtype=[]), True, "dtype of norm.scale is not a"),
    (lambda v: v["tensors"]["norm.scale"].update(sha256="0"), True, "the content of norm.scale"),
    (lambda v: v.update(tokenizer={"spec": "/etc/passwd", "fingerprint": ""}), True, "neither"),
  ],
)
def test_export_wrong_manifest_rejected(exported, change, honest, message):
  rewrite(exported[0], change, honest)
  with pytest.raises(exports.ExportError, match=message):
    _ = train.load_model(exported[0]).tokenizer


def test_export_damaged_tensors_rejected(exported, tmp_path):
  folder, _ = exported
  path = folder / exports.TENSORS
  raw = bytearray(path.read_bytes())
  raw[-5] ^= 1
  path.write_bytes(raw)
  with pytest.raises(exports.ExportError, match="has changed since it was written"):
    train.load_model(folder)
  path.write_bytes(raw[:-1])
  with pytest.raises(exports.ExportError, match=r"model\.safetensors cannot be read"):
    train.load_model(folder)
  safetensors.numpy.save_file({"other": np.zeros(3)}, path)
  with pytest.raises(exports.ExportError, match="has other tensors"):
    train.load_model(folder)
  shutil.move(path, tmp_path / "elsewhere")
  path.symlink_to(tmp_path / "elsewhere")
  with pytest.raises(exports.ExportError, match="is a link; links are not followed"):
    train.load_model(folder)


def test_import_mismatch_rejected(tiny, tmp_path, exported):
  folder, _ = exported
  trainer.prepare(tiny().data)
  with pytest.raises(exports.ExportError, match=r"model\.dim: 16 in the exported model"):
    import_model(folder, tiny())
  model = config.to_dict(MODEL)
  with pytest.raises(DataError, match="does not exist: 'bpe:257'"):
    import_model(folder, tiny(model=model, data__tokenizer="bpe:257", data__folder=str(tmp_path)))
  train_bpe("bpe:257", tmp_path, ["a b"])
  with pytest.raises(exports.ExportError, match=r"use --set data\.tokenizer=bytes"):
    import_model(folder, tiny(model=model, data__tokenizer="bpe:257", data__folder=str(tmp_path)))
  assert not (tmp_path / "run").exists()


def test_load_model_without_model_rejected(tiny, tmp_path):
  with pytest.raises(RunFolderError, match="is not a run folder"):
    train.load_model(tmp_path)
  cfg = tiny(steps=1)
  RunFolder(cfg.run_dir).path.mkdir()
  RunFolder(cfg.run_dir).write_config(cfg)
  with pytest.raises(FileNotFoundError, match="no checkpoint in"):
    train.load_model(cfg.run_dir)
  with pytest.raises(FileNotFoundError, match="no checkpoint of step 3"):
    train.load_model(cfg.run_dir, step=3)
  (tmp_path / "run/checkpoints/3/params").mkdir(parents=True)
  with pytest.raises(store.CheckpointError, match=r"3 is damaged: it has no digests\.json"):
    train.load_model(cfg.run_dir, step=3)


def test_export_keeps_a_named_end_of_text(tmp_path):
  train_bpe("bpe:262", tmp_path, ["the quick river"])
  tokenizer = load_tokenizer(str(tmp_path), end_of_text="Z")
  model = dataclasses.replace(MODEL, vocab_size=262)
  export.write(tmp_path / "out", model, random_params(model), tokenizer, 7)
  manifest = exports.read_manifest(tmp_path / "out")
  found = exports.tokenizer_of(tmp_path / "out", manifest)
  assert found.fingerprint == tokenizer.fingerprint and found.end_of_text == tokenizer.end_of_text


@pytest.mark.slow
def test_model_of_another_loop_is_imported_into_a_run(tiny, config_file, tmp_path):
  cfg = tiny(run_dir=str(tmp_path / "run"))
  trainer.prepare(cfg.data)
  model = models.LanguageModel(dataclasses.replace(cfg.model), rngs=nnx.Rngs(0))
  lnssm_jax.save_model(tmp_path / "out", model)
  assert main(["import", str(tmp_path / "out"), "--config", config_file(cfg)]) == 0
  assert same_bits(params_of(train.load_model(tmp_path / "run").model), params_of(model))
