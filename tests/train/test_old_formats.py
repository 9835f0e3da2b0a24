"""Runs and exports of format 1 (before mixers' options and parameters were renamed) still load.

`old_format/` was written by the last version of that format: the parameters of every mixer, and a
run of 6 steps with its checkpoint of step 4, the export of that step, and the losses of steps 5, 6.
"""

import functools
import hashlib
import inspect
import json
import shutil
import tarfile
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.files.reading import digest_of
from lnssm_jax.mixers import MIXERS, migration
from lnssm_jax.models.block import make_mixer
from lnssm_jax.pretrained import exports, old_formats
from train import config, trainer
from train.checkpoint import store
from train.cluster.device_mesh import make_mesh
from train.runs import loading
from train.runs.run_folder import RunFolder, RunFolderError
from train.step.model import params_of
from train.step.state import abstract_state

FOLDER = Path(__file__).parent / "old_format"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())


def digests(tree) -> list[str]:
  """SHA-256 of the bytes of each leaf, sorted: names and order do not count."""
  arrays = (np.ascontiguousarray(x) for x in jax.tree.leaves(tree))
  return sorted(hashlib.sha256(x.tobytes()).hexdigest()[:16] for x in arrays)


@pytest.fixture(scope="session")
def old(tmp_path_factory):
  """Folder of the old run and export."""
  folder = tmp_path_factory.mktemp("old")
  with tarfile.open(FOLDER / "run_and_export.tar.xz") as file:
    file.extractall(folder, filter="data")
  return folder


@pytest.fixture
def old_run(old, text_folder, tmp_path):
  """Config of the old run, in a copy of its folder, with its text in `tmp_path`."""
  shutil.copytree(old / "run", tmp_path / "run")
  file = tmp_path / "run" / "config.json"
  values = json.loads(file.read_text())
  values["run_dir"] = str(tmp_path / "run")
  values["data"]["folder"] = str(tmp_path / "tokens")
  values["data"]["sources"] = {"train": str(text_folder / "train.jsonl")}
  file.write_text(json.dumps(values))
  return RunFolder(tmp_path / "run").load_config()


@pytest.mark.slow
def test_old_parameters_of_every_mixer_get_current_paths():
  for name, old in json.loads((FOLDER / "parameters.json").read_text()).items():
    place = {"num_heads": 2, "layer": 0, "num_layers": 1}
    build = functools.partial(make_mixer, name, 32, **place)
    params = jax.eval_shape(lambda build=build: params_of(build(rngs=nnx.Rngs(0))))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    path = lambda keys: jax.tree_util.keystr(keys, simple=True, separator="/")
    current = {path(keys): f"{x.dtype}{list(x.shape)}" for keys, x in leaves}
    assert {migration.renamed_parameter(name, path): x for path, x in old.items()} == current, name


def test_old_options_of_every_mixer_get_current_names():
  for name, table in migration.RENAMED_OPTIONS.items():
    current = inspect.signature(MIXERS[name].__init__).parameters
    for old, new in table.items():
      assert old not in current and new in current
      model = {"mixer": name, "mixer_options": {old: 3}}
      assert old_formats.current_model(model)["mixer_options"] == {new: 3}


def test_old_run_config_has_current_names(old_run):
  options = old_run.model.mixer_options
  assert options["gla"] == {"gate_logit_normalizer": 8.0}
  assert options["softmax_attention"] == {"num_kv_heads": 1, "use_bias": True}


@pytest.mark.slow
def test_old_run_restored_bit_for_bit_and_resumed(old_run):
  abstract = abstract_state(old_run, make_mesh(old_run))
  trees = {"params": abstract.pop("params"), "optimizer": abstract}
  loaded, step, _ = store.load(Path(old_run.run_dir) / "checkpoints", trees)
  assert step == 4
  assert {name: digests(tree) for name, tree in loaded.items()} == {
    name: EXPECTED[name] for name in loaded
  }
  assert trainer.fit(old_run).step == 6
  losses = {row["step"]: row["loss"] for row in RunFolder(old_run.run_dir).read_rows()[-2:]}
  expected = {int(step): loss for step, loss in EXPECTED["losses"].items()}
  assert losses == pytest.approx(expected, rel=1e-5)  # compiled differently
  # Now it has the current format: config.json and the new checkpoint.
  assert json.loads(RunFolder(old_run.run_dir).config_file.read_text())["format"] == 2
  assert digests(loading.load_params(old_run, make_mesh(old_run), step=4)[0]) == EXPECTED["params"]
  assert loading.load_params(old_run, make_mesh(old_run))[1] == 6


@pytest.mark.slow
def test_old_export_loaded_bit_for_bit(old, old_run):
  manifest, params = exports.read(old / "exported")
  assert (manifest.step, digests(params)) == (4, EXPECTED["params"])
  loaded = loading.load_model(old / "exported")
  assert config.Model(**loaded.settings["model"]) == old_run.model
  run = loading.load_model(old_run.run_dir)
  (graph, state), (run_graph, run_state) = nnx.split(loaded.model), nnx.split(run.model)
  assert graph == run_graph
  jax.tree.map(np.testing.assert_array_equal, state, run_state)


def test_unknown_format_rejected(old, old_run, tmp_path):
  file = Path(old_run.run_dir) / "config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 3}))
  with pytest.raises(RunFolderError, match="format=3, but this version reads 1 and 2"):
    RunFolder(old_run.run_dir).load_config()
  shutil.copytree(old / "exported", tmp_path / "exported")
  file = tmp_path / "exported" / exports.MANIFEST
  values = json.loads(file.read_text()) | {"format": "lnssm_jax model, version 3"}
  del values["sha256"]
  file.write_text(json.dumps(values | {"sha256": digest_of(values)}))
  with pytest.raises(exports.ExportError, match=r"version 3', but this version reads .*version 2"):
    exports.read(tmp_path / "exported")


def test_format_written_to_config_checkpoint_and_manifest(old_run):
  with RunFolder(old_run.run_dir) as run:
    run.write_config(old_run)
    assert json.loads(run.config_file.read_text())["format"] == old_formats.FORMAT
    assert run.load_config() == old_run
  assert f"lnssm_jax model, version {old_formats.FORMAT}" == exports.FORMAT
