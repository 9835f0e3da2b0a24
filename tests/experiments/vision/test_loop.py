"""Runs of an image classifier: they learn, stop, resume and say what is wrong."""

import json
import re
import signal
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.command import main
from experiments.vision import loop
from experiments.vision.settings import Augment, Data, Model, Vision
from tests.devices import result_of
from tests.experiments.vision.conftest import SIZE
from train.cli.main import main as train
from train.config import ConfigError, Optimizer, apply_overrides
from train.runs.run_folder import RunFolder
from train.step.optimizer import make_optimizer

MODEL = {"mixer": "lrn", "dim": 16, "num_layers": 1, "num_classes": 3, "image_size": SIZE}
OPTIMIZER = Optimizer(peak_lr=1e-2, final_lr=1e-3, schedule="cosine", ema_decay=0.8)


def config(tmp_path, file, **changes) -> Vision:
  values = {
    "model": Model(**MODEL, patch_size=4, dtype="float32", drop_path=0.1),
    "optimizer": OPTIMIZER,
    "data": Data(train=f"{file}:train", validation=f"{file}:test"),
    "augment": Augment(
      least_area=0.8, flip=False, rand_augment=3, mixup=0.2, cutmix=0, erasing=0.1, repeats=1
    ),
    "run_dir": str(tmp_path / "run"),
    "epochs": 8,
    "warmup_epochs": 1,
    "global_batch": 16,
    "log_every": 2,
    "workers": 2,
  }
  return Vision(**(values | changes))


@pytest.fixture(scope="module", autouse=True)
def _equal_runs_share_their_programs():
  """Runs of equal programs compile them once: most of their time is that."""
  made, make = {}, loop.make_steps

  def make_once(cfg, epoch):
    parts = cfg.model, cfg.optimizer, cfg.augment, cfg.epochs, cfg.warmup_epochs, cfg.seed
    if (key := repr((parts, epoch))) not in made:
      made[key] = make(cfg, epoch)
    return made[key]

  with mock.patch.object(loop, "make_steps", make_once):
    yield


def rows(run):
  return RunFolder(run).read_rows()


@pytest.fixture(scope="module")
def whole(tmp_path_factory, file):
  """(folder with a finished run, its result)."""
  folder = tmp_path_factory.mktemp("whole")
  return folder, loop.fit(config(folder, file))


@pytest.mark.slow
def test_run_learns_and_records(whole):
  folder, result = whole
  assert (result.step, result.stopped_by) == (24, None)
  assert result.validation["accuracy"] > 0.8
  found = rows(folder / "run")
  assert [row["step"] for row in found if row["kind"] == "eval"] == list(range(3, 25, 3))
  assert found[-1] == result.validation
  assert found[-1]["images"] == 20
  assert found[-1]["ema_accuracy"] > 0.8 and found[-1]["ema_val_loss"] != found[-1]["val_loss"]
  assert json.loads((folder / "run" / "config.json").read_text())["epochs"] == 8
  assert {row["epoch"] for row in found if row["kind"] == "train"} >= {2 / 3, 1, 8}
  assert all(row["epoch"] == row["step"] / 3 for row in found if row["kind"] == "train")
  saved = sorted(int(path.name) for path in (folder / "run" / "checkpoints").iterdir())
  assert saved == [21, 24]  # after each epoch; the newest two are kept


def test_schedule_is_over_all_steps_and_its_warmup_over_epochs(tmp_path, file):
  asked = []

  def make(optimizer, steps):
    asked.append((optimizer.warmup_steps, optimizer.peak_lr, steps))
    return make_optimizer(optimizer, steps)

  with mock.patch.object(loop, "make_optimizer", make):
    loop.make_steps(config(tmp_path, file, warmup_epochs=2, epochs=5, seed=9), 3)
  assert asked == [(2 * 3, 1e-2, 5 * 3)]


def test_noise_and_dropout_have_keys_of_their_own_by_seed_and_step(tmp_path, file):
  """Nothing is computed: the model is replaced by one that keeps its key."""

  class Seen(Exception):
    pass

  def keys(seed, step):
    cfg, found = config(tmp_path, file, seed=seed), []
    _, train_step, _ = loop.make_steps(cfg, 3)

    def on_device(batch, cfg, key):
      found.append(key)
      return None, None

    def call(images, *, dropout_key):
      found.append(dropout_key)
      raise Seen

    with (
      mock.patch.object(loop, "on_device", on_device),
      mock.patch.object(loop.nnx, "merge", lambda graph, params: call),
      pytest.raises(Seen),
    ):
      train_step.__wrapped__({"step": jnp.int32(step), "params": jnp.ones(2)}, None)
    return [jax.random.key_data(key).tobytes() for key in found]

  assert keys(0, 4) == keys(0, 4)
  assert len({key for seed, step in ((0, 4), (0, 5), (1, 4)) for key in keys(seed, step)}) == 6


def test_parameters_begin_with_the_seed_of_the_run(tmp_path, file):
  cfg = config(tmp_path, file, seed=7)
  new = types.SimpleNamespace(restore=lambda abstract: None)
  state, step = loop._begin(cfg, jax.random.key_data, new, loop._shardings(cfg)[0])
  np.testing.assert_array_equal(state, jax.random.key_data(jax.random.key(7)))
  assert step == 0


def test_run_that_was_stopped_resumes_with_the_same_numbers(tmp_path, file, whole):
  append = RunFolder.append

  def interrupt(self, new):
    if new[0]["step"] == 8:
      signal.raise_signal(signal.SIGTERM)
    return append(self, new)

  with mock.patch.object(RunFolder, "append", interrupt):
    stopped = loop.fit(config(tmp_path, file))
  assert (stopped.step, stopped.stopped_by) == (8, "SIGTERM")
  resumed = loop.fit(config(tmp_path, file))
  assert resumed.step == 24
  for a, b in zip(jax.tree.leaves(whole[1].state), jax.tree.leaves(resumed.state), strict=True):
    np.testing.assert_array_equal(a, b)
  steps = lambda folder: [row["step"] for row in rows(folder / "run")]
  assert steps(tmp_path) == steps(whole[0])


ON_DEVICES = """
import json, sys
from experiments.vision.settings import Vision
from train.config import Optimizer
from experiments.vision.settings import Augment, Data, Model
from experiments.vision import loop
result = loop.fit(eval(sys.argv[1]))
print(json.dumps(result.validation["val_loss"]))
"""


@pytest.mark.slow
def test_batch_sharded_over_devices_gives_the_same_numbers(tmp_path, file):
  runs = []
  for devices in (1, 4):
    cfg = config(tmp_path, file, run_dir=str(tmp_path / str(devices)), epochs=4)
    runs.append(result_of("-c", ON_DEVICES, repr(cfg), devices=devices))
  assert runs[0] == pytest.approx(runs[1], rel=1e-4)


def test_number_of_devices_divides_the_batch(tmp_path, file):
  with (
    mock.patch.object(jax, "device_count", lambda: 3),
    pytest.raises(ValueError, match="global_batch=16 is not a multiple of the 3 devices; use 15"),
  ):
    loop.fit(config(tmp_path, file))


@pytest.mark.slow
def test_settings_of_a_run_must_not_change(tmp_path, file):
  loop.fit(config(tmp_path, file))
  with pytest.raises(ValueError, match="seed: the folder's run has 0, this one 1"):
    loop.fit(config(tmp_path, file, seed=1))


def test_steps_that_are_not_finite_end_the_run(tmp_path, file):
  make = loop.make_steps

  def diverging(cfg, epoch):
    initialize, _, evaluate = make(cfg, epoch)
    skipped = {"loss": np.nan, "skipped": 1.0}
    return initialize, lambda state, batch: (state, skipped), evaluate

  with (
    mock.patch.object(loop, "make_steps", diverging),
    pytest.raises(loop.DivergedError, match=r"the last 3 steps, up to 3, were skipped, as"),
  ):
    loop.fit(config(tmp_path, file, max_skipped=3, checkpoint_every=4))
  assert [row["kind"] for row in rows(tmp_path / "run")][:2] == ["skipped"] * 2
  assert not list((tmp_path / "run" / "checkpoints").glob("*"))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (["global_batch=64"], "has 50 images, less than global_batch=64"),
    (["model.num_classes=2"], "the images have 3 classes, model.num_classes=2"),
    (["data.validation=nowhere"], "no folder 'nowhere'"),
  ],
)
def test_images_that_do_not_fit_rejected(tmp_path, file, changes, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    loop.fit(apply_overrides(config(tmp_path, file), changes))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (["model.channels=2"], "model.channels=2 must be 1 (gray) or 3 (colors)"),
    (["model.channels=1"], "data.mean=(0.485, 0.456, 0.406) needs one number for each of"),
    (["model.dim=0"], "model.dim=0 must be an integer of at least 1"),
    (["data.std=(0.0, 1.0, 1.0)"], "data.std=(0.0, 1.0, 1.0) must be positive"),
    (["augment.least_area=0"], "augment.least_area=0.0 leaves nothing of an image"),
    (["augment.erasing=2"], "augment.erasing=2.0 must be between 0 and 1"),
    (["augment.mixup=-1"], "augment.mixup=-1.0 must be at least 0"),
    (["augment.rand_augment=11"], "augment.rand_augment=11.0 must be between 0 and 10"),
    (["epochs=1"], "warmup_epochs=1 must be between 0 and epochs=1 - 1"),
    (["workers=0"], "workers=0 must be at least 1"),
    (["run_dir="], "run_dir is empty"),
    (["seed=-1"], "seed=-1 must be in [0, 2**32)"),
    (["optimizer.warmup_steps=3"], "give warmup_epochs"),
    (["optimizer.logit_penalty=1"], "is for language models; use 0"),
    (["augment.repeats=0"], "augment.repeats=0 must be at least 1"),
    (["augment.flop=true"], "no setting 'augment.flop' in Augment; did you mean 'flip'?"),
  ],
)
def test_wrong_settings_rejected(tmp_path, file, changes, message):
  with pytest.raises(ConfigError, match=re.escape(message)):
    apply_overrides(config(tmp_path, file), changes)


@pytest.mark.slow
def test_command_trains_with_a_config(tmp_path, file, capsys):
  text = f"""
from experiments.vision.settings import Vision
from train.config import Optimizer
from experiments.vision.settings import Augment, Data, Model
def get_config():
  return {config(tmp_path, file)!r}
"""
  (tmp_path / "own.py").write_text(text)
  options = ["--config", str(tmp_path / "own.py"), "--set", "log_every=4"]
  assert main(["classify", *options, "--dry-run"]) == 0
  described = capsys.readouterr().out
  assert "lrn, 2,931 parameters" in described
  assert "memory" in described
  assert main(["classify", *options, "--print-config"]) == 0
  assert json.loads(capsys.readouterr().out)["model"]["drop_path"] == 0.1
  assert main(["classify", *options]) == 0
  assert "accuracy" in capsys.readouterr().out
  assert main(["evaluate", "--run-dir", str(tmp_path / "run"), "--json"]) == 0
  assert json.loads(capsys.readouterr().out) == [rows(tmp_path / "run")[-1]]
  assert main(["evaluate", "--run-dir", str(tmp_path / "run"), "--set", "model.dim=8"]) == 2
  assert "does not match the model" in capsys.readouterr().err
  assert train(["generate", "--run-dir", str(tmp_path / "run")]) == 2
  assert (
    "is a run of another program: its settings are augment, epochs, w" in capsys.readouterr().err
  )
  assert train(["fit", *options]) == 2
  assert "returned Vision, not a train.config.Train" in capsys.readouterr().err
