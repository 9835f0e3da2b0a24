"""Adapters in the layout of PEFT: read as PEFT computes them, and written as it opens them."""

import json
import os
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from lnssm_jax import pretrained
from lnssm_jax.models.settings import abstract_params, params_of
from lnssm_jax.pretrained import ExportError, exports, folders, hugging_face
from lnssm_jax.pretrained.families import family_of, layers
from tests.pretrained.published import CASES, GOLDEN, recorded, write

ROOT = Path(__file__).parents[2]
PEERS = Path(os.environ.get("PEERS", ROOT / ".venv-peers")) / "bin" / "python"
CONFIG, TENSORS = hugging_face.adapters.CONFIG, hugging_face.adapters.TENSORS
CASE = "qwen3_5_text"
_logits = jax.jit(lambda model, tokens: model(tokens)[0])


def recorded_adapter(folder, **changes):
  """The adapter that PEFT wrote, with changes of its settings; (its arrays, its logits)."""
  with np.load(GOLDEN / "adapters" / f"{CASE}.npz") as file:
    arrays = {name: file[name] for name in file.files if name not in ("config", "logits")}
    config, logits = json.loads(file["config"].tobytes()), file["logits"]
  folder.mkdir(exist_ok=True)
  save_file(arrays, folder / "adapter_model.safetensors")
  (folder / "adapter_config.json").write_text(json.dumps(config | changes))
  return arrays, logits


@pytest.mark.parametrize("case", [CASE, "qwen3_5"])
def test_adapter_of_peft_gives_its_logits(case, tmp_path):
  _, want = recorded_adapter(tmp_path / "adapter")
  base = recorded(CASE).tensors
  if case == "qwen3_5":  # adapted as the text model alone
    text = {n.replace("model.", "model.language_model.", 1): x for n, x in base.items()}
    folder = write(tmp_path / "base", case, tensors=text)
  else:
    folder = write(tmp_path / "base", case)
  with jax.enable_x64(True):
    model = pretrained.load(folder, adapter=tmp_path / "adapter").model
    got = np.asarray(_logits(model, recorded(CASE).tokens))
  assert np.abs(got - want).max() < 1e-6 * np.abs(want).max()  # logits are float32
  assert np.abs(recorded(CASE).logits - want).max() > 0.01 * np.abs(want).max()


def factors_of(model, rank=2):
  """Random factors of the projections of the mixers, and of the MLP's last matrix."""
  rng, found = np.random.default_rng(0), {}
  draw = lambda *size: rng.normal(size=size).astype(np.float32)
  for name, x in exports.flat(params_of(model)).items():
    if name.endswith(("_proj.kernel", "down.kernel")):
      *lead, rows, columns = x.shape
      found[name] = draw(*lead, rows, rank), draw(*lead, rank, columns)
  return found


def test_saved_factors_are_the_corrections_that_are_loaded(tmp_path):
  folder = write(tmp_path / "base", CASE, dtype=np.float32)
  loaded = pretrained.load(folder)
  factors, settings = factors_of(loaded.model), loaded.settings["model"]
  assert len(factors) > 10
  pretrained.save_adapter(tmp_path / "ours", factors, settings, scale=0.5, model_type=CASE)
  got = exports.flat(params_of(pretrained.load(folder, adapter=tmp_path / "ours").model))
  for name, x in exports.flat(params_of(loaded.model)).items():
    change = 0.5 * np.matmul(*factors[name]) if name in factors else 0
    np.testing.assert_allclose(got[name], x + change, rtol=1e-5, atol=1e-5, err_msg=name)
  config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
  # Three of ours are one of theirs.
  assert config["rank_pattern"]["linear_attn.in_proj_qkv"] == 6 and config["r"] == 2
  with pytest.raises(ExportError, match="is not empty"):
    pretrained.save_adapter(tmp_path / "ours", factors, settings, scale=0.5)
  name, (a, b) = next(iter(factors.items()))
  for wrong, scale, message in (
    ({"embedding": (np.ones((11, 1)), np.ones((1, 8)))}, 1, "embedding is no matrix"),
    ({name: (a[:1], b)}, 1, r"have the shapes \[.*, but its matrix has"),
    ({name: (a, b[:, :1])}, 1, "have the shapes"),
    ({name: (a, b[..., 1:])}, 1, "have the shapes"),
    ({name: a}, 1, r"have the shapes \[\]"),
    ({}, 1, "factors has no kernel"),
    ({"head": (a, b)}, 1, "has no parameter like head"),
    (factors, float("nan"), "scale=nan must be a number above 0"),
  ):
    with pytest.raises(ExportError, match=message):
      pretrained.save_adapter(tmp_path / "other", wrong, settings, scale=scale)


@pytest.mark.parametrize(
  "case",
  [pytest.param(case, marks=[pytest.mark.slow] * (case != "bailing_hybrid")) for case in CASES],
)
def test_factors_of_every_family_are_those_of_its_own_matrices(case):
  """Also where a matrix of theirs has its rows in another order, as that of Ling's latents."""
  config = recorded(case).config
  family = family_of(config)
  settings = family.settings(folders.plain(config))
  rng, factors = np.random.default_rng(0), {}
  for name, x in exports.flat(abstract_params(settings)).items():
    if name.endswith("_proj.kernel") or (".channel_mixer." in name and name.endswith(".kernel")):
      *lead, rows, columns = x.shape
      draw = lambda *size: rng.normal(size=size)
      factors[name] = draw(*lead, rows, 2), draw(*lead, 2, columns)
  experts = {name: x for name, x in factors.items() if x[0].ndim > 3}
  for name in experts:
    with pytest.raises(ExportError, match=f"^{name} is no matrix of"):
      hugging_face.adapters.check(family, settings, {name: experts[name][0].shape})
    del factors[name]
  theirs = {}
  for module, a, b in hugging_face.adapters._by_module(family, settings, factors):
    theirs[module] = theirs.get(module, 0) + b @ a
  shapes = {name: (*a.shape[:-1], b.shape[-1]) for name, (a, b) in factors.items()}
  for parameter in layers.parameters(family, settings, shapes):
    change = np.matmul(*factors[parameter.name])
    for number, pieces in enumerate(parameter.layers):
      for theirs_name, view, part, _ in pieces:
        want = change[number] if parameter.stacked else change
        got = view(theirs[theirs_name.removesuffix(".weight")])
        np.testing.assert_allclose(got, part(want) if part else want, err_msg=parameter.name)


@pytest.mark.slow
@pytest.mark.skipif(not PEERS.exists(), reason="make test-peers makes its environment")
def test_saved_adapter_has_the_same_logits_in_peft(tmp_path):
  folder = write(tmp_path / "base", CASE, dtype=np.float32)
  loaded = pretrained.load(folder)
  factors, settings = factors_of(loaded.model), loaded.settings["model"]
  pretrained.save_adapter(tmp_path / "ours", factors, settings, scale=0.5, model_type=CASE)
  command = [PEERS, "-m", "tests.peers.record_adapter", folder, tmp_path / "ours"]
  environment = os.environ | {"PYTHONPATH": str(ROOT)}
  done = subprocess.run(
    [*command, tmp_path / "out.npy"], cwd=ROOT, env=environment, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr[-2000:]
  model = pretrained.load(folder, adapter=tmp_path / "ours").model
  ours, theirs = _logits(model, recorded(CASE).tokens), np.load(tmp_path / "out.npy")
  assert np.abs(ours - theirs).max() < 2e-5 * np.abs(theirs).max()


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"use_dora": True}, "use_dora=True of an adapter is not implemented"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
    ({"peft_type": "LOHA"}, "peft_type='LOHA'"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"lora_alpha": "3"}, "lora_alpha='3'"),
    ({"alpha_pattern": [1]}, r"alpha_pattern=\[1\]"),
    ({"r": None}, "r=None"),
    ({"r": 0}, "r=0"),
    ({"r": 77}, "has rank 2, which is neither r nor in rank_pattern"),
    ({"rank_pattern": "x"}, "rank_pattern='x'"),
    ({"rank_pattern": {"x": 1.5}}, r"rank_pattern=\{'x': 1.5\}"),
    ({"alpha_pattern": {r"layers\.\d+\.x": 5}}, "other regular expressions are not implemented"),
    ({"use_rslora": "no"}, "use_rslora='no'"),
  ],
)
def test_adapter_of_another_kind_is_an_error_that_names_it(change, message, tmp_path):
  recorded_adapter(tmp_path, **change)
  with pytest.raises(ExportError, match=f"^{tmp_path}: .*{message}") as error:
    hugging_face.adapters.read(tmp_path)
  assert "\n" not in str(error.value)


def test_scale_of_an_adapter_by_module_is_of_whole_names(tmp_path):
  """As in PEFT: "q" is no part of "x_q"; and lora_alpha is 8 where it is not named."""
  pair = {
    ".lora_A.weight": np.ones((2, 3), np.float32),
    ".lora_B.weight": np.ones((4, 2), np.float32),
  }
  modules = [f"base_model.model.layers.0.{name}" for name in ("q", "x_q")]
  save_file({m + end: x for m in modules for end, x in pair.items()}, tmp_path / TENSORS)
  (tmp_path / CONFIG).write_text(
    json.dumps({"peft_type": "LORA", "r": 2, "alpha_pattern": {"q": 6}})
  )
  found = hugging_face.adapters.read(tmp_path)
  assert {name: x.scale for name, x in found.items()} == {
    "layers.0.q.weight": 3,
    "layers.0.x_q.weight": 4,
  }


def test_adapter_of_no_rank_or_twice_the_same_matrix_is_an_error(tmp_path):
  arrays, _ = recorded_adapter(tmp_path)
  one = hugging_face.adapters.Correction(np.zeros((2, 3)), np.zeros((4, 2)), 1.0)
  both = {"model.language_model.q.weight": one, "model.q.weight": one}
  with pytest.raises(ExportError, match=r"changes model\.q\.weight twice, by two names"):
    hugging_face.adapters.named(both, {"model.q.weight": (4, 3)})
  empty = {name: x[:0] if "lora_A" in name else x[:, :0] for name, x in arrays.items()}
  save_file(empty, tmp_path / "adapter_model.safetensors")
  with pytest.raises(ExportError, match="has rank 0, which is neither r nor in rank_pattern"):
    hugging_face.adapters.read(tmp_path)


def test_adapter_of_another_model_is_an_error(tmp_path):
  arrays, _ = recorded_adapter(tmp_path / "adapter")
  folder = write(tmp_path / "base", "qwen3", dtype=np.float32)
  with pytest.raises(ExportError, match=r"changes model\.layers\..* the model has"):
    pretrained.load(folder, adapter=tmp_path / "adapter")
  first = next(iter(arrays))
  save_file({first: arrays[first]}, tmp_path / "adapter" / "adapter_model.safetensors")
  with pytest.raises(ExportError, match=r"no config\.json; it is an adapter: load its model with"):
    pretrained.load(tmp_path / "adapter")
  with pytest.raises(ExportError, match="is no part of a correction"):
    pretrained.load(folder, adapter=tmp_path / "adapter")
  with pytest.raises(ExportError, match=r"no adapter of PEFT"):
    pretrained.load(folder, adapter=tmp_path)
