"""`lnssm-train inspect`: what it says is true, and it reads only what is asked for."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from orbax.checkpoint import v1 as ocp

import train
from lnssm_jax import load_model
from lnssm_jax.pretrained import DataError, exports
from train import config
from train.checkpoint.store import Checkpoints
from train.cli.main import main
from train.cluster.device_mesh import make_mesh
from train.data.tokenizers import load_tokenizer
from train.inspection import half_lives, page, text
from train.inspection.arrays import OrbaxArrays
from train.inspection.report import report, to_json
from train.inspection.statistics import difference, statistics
from train.runs import export
from train.runs.config_file import RunFolderError
from train.runs.run_folder import RunFolder
from train.step.state import init_state

ROWS = [{"kind": "train", "step": step, "loss": 5 - step / 10} for step in range(1, 21)] + [
  {"kind": "eval", "step": step, "set": "v", "val_loss": 3.0, "bits_per_byte": 4 / step}
  for step in (10, 20)
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """A run with checkpoints of steps 10 and 20: (config, their parameters)."""
  numbers = {"steps": 20, "seq_len": 32, "global_batch": 2, "checkpoint_every": 5, "eval_every": 5}
  cfg = config.Train(
    model=config.Model(mixer="lrn", dim=16, num_layers=2, num_heads=2, vocab_size=257),
    optimizer=config.Optimizer(peak_lr=1e-3, final_lr=1e-4),
    data=config.Data(folder="nowhere", tokenizer="bytes", train=("t",)),
    mesh=config.Mesh(data=1),
    run_dir=str(tmp_path_factory.mktemp("inspection") / "run"),
    **numbers,
  )
  state = jax.device_get(init_state(cfg, make_mesh(cfg)))
  later = state | {"params": jax.tree.map(lambda x: x + np.float32(0.5), state["params"])}
  folder = RunFolder(cfg.run_dir)
  folder.path.mkdir()
  folder.write_config(cfg)
  folder.append(ROWS)
  metadata = {"data_position": 0, "data": None}
  with Checkpoints(folder.checkpoints, keep=2) as checkpoints:
    for step, values in ((10, state), (20, later)):
      checkpoints.save(step, jax.device_put(values), metadata)
      checkpoints.wait()
  return cfg, exports.flat(state["params"]), exports.flat(later["params"])


@pytest.fixture
def run(made, tmp_path):
  """A copy of that run."""
  shutil.copytree(made[0].run_dir, tmp_path / "run")
  return dataclasses.replace(made[0], run_dir=str(tmp_path / "run")), *made[1:]


def by_name(rows):
  return {row["name"]: row for row in rows}


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int8"])
def test_statistics_equal_their_definitions(dtype):
  rng = np.random.default_rng(0)
  x = (20 * rng.standard_normal((3, 400_000))).astype(np.dtype(dtype))  # several blocks
  x[0, :7] = 0
  exact = x.astype(np.float64)
  found, rms = statistics(x), math.sqrt(np.mean(exact**2))
  assert found["norm"] == pytest.approx(np.linalg.norm(exact), rel=1e-12)
  assert found["rms"] == pytest.approx(rms, rel=1e-12)
  assert found["largest"] == np.abs(exact).max()
  assert found["near_zero"] == np.mean(np.abs(exact) <= 1e-3 * rms)
  assert found["non_finite"] == 0


def test_statistics_of_special_numbers():
  x = np.array([3.0, -4.0, np.nan, np.inf, -np.inf], ml_dtypes.bfloat16)
  found = statistics(x)
  assert (found["norm"], found["largest"], found["non_finite"]) == (5.0, 4.0, 3)
  assert statistics(np.zeros(4))["near_zero"] == 1
  assert statistics(np.full(3, np.nan))["non_finite"] == 3
  assert statistics(np.zeros((0, 4))) == dict.fromkeys(found, 0)
  assert statistics(np.array([3 + 4j]))["norm"] == 5
  assert statistics(np.array(-2.0))["largest"] == 2


def test_difference_equals_its_definition():
  rng = np.random.default_rng(0)
  x, y = rng.standard_normal((2, 600_000)).astype(np.float32)
  y[:100] = x[:100]
  exact = x.astype(np.float64) - y
  found = difference(x, y)
  assert found["norm"] == pytest.approx(np.linalg.norm(exact), rel=1e-12)
  assert found["relative"] == pytest.approx(
    np.linalg.norm(exact) / np.linalg.norm(y.astype(np.float64)), rel=1e-12
  )
  assert found["largest"] == np.abs(exact).max()
  assert found["changed"] == np.mean(x != y)
  assert difference(x, x) == {"norm": 0, "relative": 0, "largest": 0, "changed": 0}
  odd = difference(np.array([1.0, np.nan, 5.0]), np.array([1.0, 2.0, np.inf]))
  assert odd == {"norm": 0, "relative": 0, "largest": 0, "changed": pytest.approx(2 / 3)}
  assert difference(np.ones(2), np.zeros(2))["relative"] is None


def test_report_of_a_run_has_its_parameters_steps_and_curves(run):
  cfg, before, after = run
  found = report(cfg.run_dir)
  assert (found["kind"], found["step"], found["settings"]["seq_len"]) == ("run", 20, 32)
  states = [(entry["step"], entry["state"]) for entry in found["steps"]]
  assert states == [(10, "complete"), (20, "parameters intact")]
  rows = by_name(found["parameters"])
  assert rows.keys() == after.keys()
  for name, array in after.items():
    assert (rows[name]["shape"], rows[name]["dtype"]) == (list(array.shape), "float32")
    assert rows[name]["norm"] == pytest.approx(np.linalg.norm(array.astype(np.float64)), rel=1e-9)
  assert found["total"] == sum(array.size for array in after.values())
  assert found["curves"]["loss"][0] == [1, 4.9] and found["curves"]["loss"][-1] == [20, 3.0]
  assert found["curves"]["validation"] == {"v": [[10, 0.4], [20, 0.2]]}
  rows = by_name(report(cfg.run_dir, step=10)["parameters"])
  assert rows["embedding"]["largest"] == np.abs(before["embedding"]).max()


def test_report_of_other_runs_shows_settings_as_stored(run, tmp_path):
  path = RunFolder(run[0].run_dir).config_file
  values = json.loads(path.read_text()) | {"augment": "deit", "data": {"train": "images"}}
  path.write_text(json.dumps(values))
  found = report(run[0].run_dir, values=False)
  assert found["settings"]["augment"] == "deit" and found["data"] == {}
  sidecar = {"documents": 3, "tokens": 40, "bytes": 30, "more": 1}
  (tmp_path / "t.json").write_text(json.dumps(sidecar))
  values["data"] = {"folder": str(tmp_path), "train": ["t"], "validation": ["absent"]}
  path.write_text(json.dumps(values))
  found = report(run[0].run_dir, values=False)["data"]
  assert found == {"t": {"documents": 3, "tokens": 40, "bytes": 30}, "absent": None}
  path.write_text("{")
  with pytest.raises(ValueError, match="is damaged"):
    report(run[0].run_dir)


def test_report_reads_only_what_is_asked_for(run, monkeypatch):
  names, read = [], OrbaxArrays.__getitem__
  monkeypatch.setattr(
    OrbaxArrays, "__getitem__", lambda self, name: (names.append(name), read(self, name))[1]
  )
  found = report(run[0].run_dir, values=False)
  assert names == [] and "norm" not in found["parameters"][0]
  found = report(run[0].run_dir, select="*.bias")
  assert sorted(names) == [row["name"] for row in found["parameters"]]
  assert names and all(name.endswith(".bias") for name in names)


def test_report_compares_with_a_step_and_an_export(run, tmp_path):
  cfg, before, after = run
  found = report(cfg.run_dir, compare="10")["difference"]
  assert found["to"]["step"] == 10 and found["settings"] == {}
  for name, row in by_name(found["parameters"]).items():
    there = before[name].astype(np.float64)
    assert row["norm"] == pytest.approx(np.linalg.norm(after[name] - there), rel=1e-9)
    if there.any():
      assert row["relative"] == pytest.approx(row["norm"] / np.linalg.norm(there), rel=1e-9)
  biases = sorted(name for name in after if name.endswith(".bias"))
  found = report(cfg.run_dir, select="*.bias", compare="10")["difference"]
  assert sorted(row["name"] for row in found["parameters"]) == biases
  assert found["only_here"] == found["only_there"] == found["other_shape"] == []
  assert main(["export", cfg.run_dir, "--out", str(tmp_path / "out")]) == 0
  found = report(tmp_path / "out", compare=cfg.run_dir)
  assert (found["kind"], found["step"]) == ("exported model", 20)
  assert {row["norm"] for row in found["difference"]["parameters"]} == {0.0}
  assert found["metrics"][-1]["bits_per_byte"] == 0.2
  assert main(["export", cfg.run_dir, "--out", str(tmp_path / "ten"), "--step", "10"]) == 0
  found = report(tmp_path / "ten")
  assert found["step"] == 10 and [row["step"] for row in found["metrics"]] == [10, 10]
  row = by_name(found["parameters"])["embedding"]
  assert row["largest"] == np.abs(before["embedding"]).max()


def test_folder_of_a_published_model_is_no_run(tmp_path):
  safetensors.numpy.save_file({"a": np.ones(3)}, tmp_path / "model.safetensors")
  (tmp_path / "config.json").write_text('{"model_type": "mamba", "vocab_size": 3}')
  assert report(tmp_path)["parameters"][0]["name"] == "a"
  with pytest.raises(
    RunFolderError, match="is the folder of a published model, not of a run; open"
  ):
    RunFolder(tmp_path).load_config()


def test_difference_lists_other_settings_names_and_shapes(run, tmp_path):
  cfg, _, after = run
  arrays = {"embedding": np.zeros((3, 16), np.float32), "more": np.ones(2)}
  safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors")
  found = report(cfg.run_dir, compare=tmp_path / "x.safetensors")["difference"]
  assert (found["other_shape"], found["only_there"]) == (["embedding"], ["more"])
  assert found["only_here"] == sorted({*after} - {"embedding"}) and found["parameters"] == []
  found = report(cfg.run_dir, select="*.bias", compare=tmp_path / "x.safetensors")["difference"]
  assert found["only_here"] == sorted(name for name in after if name.endswith(".bias"))
  model = dataclasses.replace(cfg.model, num_layers=1)
  abstract = exports.abstract_params(config.to_dict(model))
  params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract)
  export.write(tmp_path / "one", model, params, load_tokenizer("bytes"), 1)
  found = report(cfg.run_dir, compare=tmp_path / "one")["difference"]
  assert found["settings"] == {"model.num_layers": [2, 1]}


def damage(folder, pattern):
  path = max(folder.rglob(pattern), key=lambda path: path.stat().st_size)
  raw = bytearray(path.read_bytes())
  raw[len(raw) // 2] ^= 1
  path.write_bytes(raw)
  return path


def test_damaged_step_is_shown_and_an_older_one_opened(run):
  checkpoints = RunFolder(run[0].run_dir).checkpoints
  damage(checkpoints / "20", "params/**/d/*")
  found = report(run[0].run_dir)
  assert found["step"] == 10
  assert found["steps"][1]["state"].startswith("DAMAGED: the content of params/")
  with pytest.raises(DataError, match=r"no checkpoint to show .* step 20: the content of"):
    report(run[0].run_dir, step=20)
  path = damage(checkpoints / "10", "optimizer/**/d/*")  # not read, so not seen
  assert report(run[0].run_dir)["steps"][0]["state"] == "parameters intact"
  path.write_bytes(path.read_bytes()[:-1])
  with pytest.raises(DataError, match=r"step 10: optimizer/.* bytes instead of"):
    report(run[0].run_dir)


def test_folder_that_holds_nothing_known_raises(run, tmp_path):
  (tmp_path / "notes.txt").write_text("")
  with pytest.raises(DataError, match=r"holds nothing to inspect: .*config\.json.*notes\.txt"):
    report(tmp_path)
  with pytest.raises(DataError, match="it does not exist"):
    report(tmp_path / "absent")
  with pytest.raises(DataError, match="it is a file"):
    report(tmp_path / "notes.txt")
  with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 7 .* there are 10, 20"):
    report(run[0].run_dir, step=7)
  with pytest.raises(DataError, match=r"fits select='norm\.scal'; did you mean 'norm\."):
    report(run[0].run_dir, select="norm.scal")
  assert main(["inspect", str(tmp_path)]) == 2


def test_arrays_of_other_programs_are_read(tmp_path):
  rng = np.random.default_rng(0)
  tree = {"a": {"b": rng.standard_normal((3, 2))}, "c": rng.standard_normal(4).astype(np.float32)}
  ocp.save(tmp_path / "orbax", tree)
  found = report(tmp_path / "orbax")
  norms = {row["name"]: row["norm"] for row in found["parameters"]}
  assert found["kind"] == "Orbax checkpoint"
  assert norms == pytest.approx(
    {"a.b": np.linalg.norm(tree["a"]["b"]), "c": np.linalg.norm(tree["c"])}
  )
  safetensors.numpy.save_file({"x": tree["c"]}, tmp_path / "orbax.safetensors")
  found = report(tmp_path / "orbax.safetensors")
  assert found["kind"] == "safetensors" and found["parameters"][0]["name"] == "x"


def test_text_json_and_page_have_every_parameter(run, tmp_path, capsys):
  cfg, _, after = run
  found = report(cfg.run_dir, compare="10")
  shown = "\n".join(text.lines(found))
  assert all(name in shown for name in after) and "20: parameters intact" in shown
  assert json.loads(to_json(found)) == json.loads(json.dumps(found))
  found["folder"] = "<script>"
  whole = page.page(found)
  assert all(name in whole for name in after) and whole.count("<svg") == 2
  assert "<script" not in whole and "http" not in whole and "src=" not in whole
  assert main(["inspect", cfg.run_dir, "--html", str(tmp_path / "x.html"), "--shapes"]) == 0
  assert (tmp_path / "x.html").read_text().startswith("<!doctype html>")
  assert capsys.readouterr().out == f"{tmp_path / 'x.html'}\n"
  both = ["--json", "--html", str(tmp_path / "y.html"), "--select", "embedding"]
  assert main(["inspect", cfg.run_dir, *both]) == 0
  assert json.loads(capsys.readouterr().out)["parameters"][0]["shape"] == [257, 16]
  assert "embedding" in (tmp_path / "y.html").read_text()
  assert main(["inspect", cfg.run_dir, "--html", str(tmp_path / "no" / "x.html")]) == 2
  assert "there is no folder" in capsys.readouterr().err


def test_losses_that_are_not_finite_are_left_out(run):
  RunFolder(run[0].run_dir).append([{"kind": "train", "step": 21, "loss": math.nan}])
  found = report(run[0].run_dir, values=False)
  assert found["curves"]["loss"][-1] == [20, 3.0]
  note = "not drawn: 1 losses that are NaN or infinite"
  assert note in list(text.lines(found)) and note in page.page(found)
  assert json.loads(to_json({"x": [math.inf, 1.0]})) == {"x": [None, 1.0]}


def test_curves_are_thinned_and_keep_every_extreme(run):
  rows = [{"kind": "train", "step": 20 + n, "loss": 1 / n} for n in range(1, 932)]
  rows[500]["loss"], rows[700]["loss"], rows[800]["loss"] = 7.0, math.inf, 1e-6
  rows[-1]["loss"] = rows[-3]["loss"]  # no extreme of the last part
  rows += [
    {"kind": "eval", "step": 20, "set": name, "val_loss": 2.0, "bits_per_byte": bits}
    for name, bits in (("w", None), ("x", math.nan))
  ]
  RunFolder(run[0].run_dir).append(rows)
  curves = report(run[0].run_dir, values=False)["curves"]
  steps = [step for step, _ in curves["loss"]]
  assert 300 < len(steps) <= 400 and steps == sorted(set(steps))
  assert (steps[0], steps[-1]) == (1, 951) and max(np.diff(steps)) < 12
  assert [521, 7.0] in curves["loss"] and [821, 1e-6] in curves["loss"]
  assert curves["not_finite"] == 1
  assert curves["validation"].keys() == {"v", "w, nats per token"}  # none without a number


def test_functions_of_train_are_those_of_its_parts():
  assert train.inspect is report
  assert train.fit.__module__ == "train.trainer"
  assert train.load_model.__module__ == "train.runs.loading"
  assert train.export is export.export_run and set(dir(train)) >= set(train.__all__)


def exported(folder, mixer):
  model = config.Model(mixer=mixer, dim=16, num_layers=2, num_heads=2, vocab_size=257)
  rng = np.random.default_rng(0)
  abstract = exports.abstract_params(config.to_dict(model))
  params = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(x.dtype), abstract)
  export.write(folder, model, params, load_tokenizer("bytes"), 1)
  return folder


def test_half_lives_of_a_layer_are_summed_up():
  row = half_lives._row(3, "GLA", np.array([[1.0, 2.0], [8.0, np.inf], [4.0, 4.0]]))
  assert (row["layer"], row["mixer"], row["channels"]) == (3, "GLA", 6)
  assert (row["shortest"], row["median"], row["longest"], row["slowest_head"]) == (1, 4, None, 1)
  assert [row["quantiles"][n][0] for n in (0, 10, 20)] == [0, 50, 100]
  assert row["quantiles"][10][1] == 4


@pytest.mark.slow
def test_half_lives_are_those_of_the_layers(tmp_path):
  folder = exported(tmp_path / "out", ("retnet", "softmax_attention"))
  found = report(folder, select="norm.scale", half_lives="")
  first, second = found["half_lives"]
  decays = np.asarray(load_model(folder).model.layer(0).mixer.decay(), np.float64)
  lives = np.log(0.5) / decays
  assert (first["layer"], first["mixer"], first["channels"]) == (0, "RetNet", lives.size)
  wanted = [lives.min(), np.median(lives), lives.max()]
  assert [first[key] for key in ("shortest", "median", "longest")] == pytest.approx(wanted)
  assert first["slowest_head"] == np.argmax(np.median(lives, axis=1))
  assert first["quantiles"][0] == [0, pytest.approx(lives.min())]
  assert (second["mixer"], second["channels"], second["median"]) == ("SoftmaxAttention", 0, None)
  assert "no decay" in "\n".join(text.lines(found)) and page.page(found).count("<svg") == 1


@pytest.mark.slow
def test_half_lives_of_data_dependent_decays_need_a_text(tmp_path):
  folder = exported(tmp_path / "out", "lrn")
  with pytest.raises(DataError, match=r"depend on .*--half-lives TEXT"):
    report(folder, half_lives="")
  first, _ = report(folder, half_lives="any text")["half_lives"]
  assert first["shortest"] <= first["median"] <= first["longest"]
  safetensors.numpy.save_file({"x": np.ones(2)}, tmp_path / "x.safetensors")
  with pytest.raises(DataError, match="but no model"):
    report(tmp_path / "x.safetensors", half_lives="")


def test_inspect_imports_no_jax(run):
  code = (
    "import sys; from train.cli.main import main; main(['inspect', sys.argv[1]]);"
    "assert not {'jax', 'flax', 'orbax', 'matplotlib'} & set(sys.modules)"
  )
  done = subprocess.run(
    [sys.executable, "-c", code, run[0].run_dir], capture_output=True, text=True, timeout=120
  )
  assert done.returncode == 0, done.stderr
  assert "embedding" in done.stdout
