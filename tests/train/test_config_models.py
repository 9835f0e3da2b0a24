"""The models of the configs: their numbers of parameters, and small ones that train."""

import functools
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.vision import loop as vision
from experiments.vision import settings as vision_settings
from experiments.vision.settings import Vision
from lnssm_jax.models import count_parameters
from tests.small_configs import (
  image_configs,
  language_configs,
  pattern_of,
  place_of,
  settings_of,
  small,
  small_images,
)
from train.cluster import device_mesh
from train.config import Model, Train, load, load_config, to_dict
from train.runs.run_folder import RunFolder
from train.step.model import build_model, model_graph
from train.step.optimizer import make_optimizer
from train.step.state import init_state
from train.step.train_step import make_train_step

ROOT = Path(__file__).parents[2]


def rows() -> dict[str, list[str]]:
  """The cells of docs/configs.md after the first, by the config that the first names."""
  found = {}
  for line in (ROOT / "docs" / "configs.md").read_text().splitlines():
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    for name in re.findall(r"`(\w+\.py(?::[\w-]+)?)`", cells[0]) if len(cells) == 5 else ():
      assert name not in found
      found[name] = cells[1:]
  return found


@functools.cache  # many variants have the same model
def count_of(model: str, is_vision: bool) -> int:
  values = json.loads(model)
  if is_vision:
    build = functools.partial(vision.build_model, vision_settings.Model(**values))
  else:
    build = functools.partial(build_model, Model(**values))
  return count_parameters(jax.eval_shape(build, jax.random.key(0)))


def test_page_of_configs_has_every_variant():
  assert sorted(rows()) == sorted(language_configs() + image_configs())


def names():
  """All rows, of which those of further variants of a file are slow."""
  files = set()
  for name in rows():
    file = name.partition(":")[0]
    yield pytest.param(name, marks=[pytest.mark.slow] * (file in files))
    files.add(file)


@pytest.mark.parametrize("name", list(names()))
def test_config_model_has_the_parameters_that_the_page_says(name, monkeypatch):
  monkeypatch.setenv("LNSSM_DATA", "folder")
  _, printed, here, difference = rows()[name]
  is_vision = name.startswith("vision")
  model = load(place_of(name), Vision if is_vision else Train).model
  count = count_of(json.dumps(to_dict(model)), is_vision)
  assert here == f"{count:,}"
  if printed:
    millions, decimals = float(printed), len(printed.partition(".")[2])
    same = round(count / 1e6, decimals) == millions
    assert difference.startswith("none" if same else f"{count / 1e6 - millions:+.1f}M, ")


@pytest.mark.parametrize(("size", "millions"), [("120m", 129.118), ("350m", 373.215)])
def test_retnet_with_a_scale_in_its_norms_has_the_other_counts_of_the_page(size, millions):
  model = load_config(ROOT / "configs" / f"longhorn.py:retnet-{size}-1024").model
  values = to_dict(model) | {"mixer_options": model.mixer_options | {"norm_scale": True}}
  assert round(count_of(json.dumps(values), False) / 1e6, 3) == millions
  assert f"{millions}M" in (ROOT / "docs" / "configs.md").read_text()


TRAINED = ["longhorn.py:retnet-120m-1024"]
# With those, every variant but for what small sizes make equal.
TRAINED_IF_SLOW = [
  *(f"longhorn.py:{name}-350m-4096" for name in ("longhorn", "mamba", "llama", "gla", "rwkv")),
  *(f"longhorn.py:{name}-1b3" for name in ("longhorn", "mamba", "llama", "gla")),
  *(f"sse.py:{name}-600m" for name in ("sse-n4k1", "sse-n4k2", "transformer", "gla", "gdn")),
  *(f"sse.py:{name}-600m" for name in ("gla-h", "sse-h", "sse-swa-h")),
  *(f"sse.py:{name}-800m" for name in ("mom-n4k1", "mom-n4k2")),
  *(f"dsf_wikitext103.py:{name}" for name in ("softmax", "linear", "normalized", "s6", "ssd")),
  *(f"mqar.py:{name}" for name in ("softmax", "linear", "normalized", "s6", "ssd")),
  *(f"mqar.py:{name}" for name in ("qlstm", "qlstm_reversed")),
  *(f"lnssm_72m.py:{name}" for name in ("lnssm", "rwkv4", "rwkv5", "mamba2", "transformer")),
  *(f"lnssm_72m.py:{name}-original" for name in ("rwkv4", "rwkv5", "mamba2")),
  "lcsm_wikitext103.py",
  "lnssm_1b3.py",
]


@pytest.mark.parametrize(
  "name", [*TRAINED, *(pytest.param(name, marks=pytest.mark.slow) for name in TRAINED_IF_SLOW)]
)
def test_config_with_small_sizes_trains_three_steps(name):
  cfg = small(name)
  mesh = device_mesh.make_mesh(cfg)
  step = make_train_step(cfg, model_graph(cfg.model), make_optimizer(cfg.optimizer, 3)[0], mesh)
  state = init_state(cfg, mesh)
  tokens = np.random.default_rng(0).integers(0, 50, (2, 17)).astype(np.int32)
  batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
  batch |= {"segment_ids": np.zeros((2, 16), np.int32), "weights": np.ones((2, 16), np.float32)}
  losses = []
  for _ in range(3):
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]))
    routed = [output for output in metrics.get("aux", ()) if output is not None]
    assert len(routed) == sum(mixer in ("sse", "mom") for mixer in pattern_of(cfg.model))
    for output in routed:
      assert output.share.shape == (4,)
      assert np.isclose(output.share.sum(), cfg.model.mixer_options.get("num_selected", 1))
      assert output.loss > 0
  assert losses[2] < losses[0]


@pytest.mark.slow
def test_every_config_trains_three_steps_at_small_sizes():
  trained = {settings_of(name) for name in TRAINED + TRAINED_IF_SLOW}
  others = [name for name in rows() if not name.startswith("vision")]
  assert [name for name in others if settings_of(name) not in trained] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in rows() if name.startswith("vision")])
def test_image_config_with_small_sizes_trains_three_steps(name, tmp_path):
  cfg = load(place_of(name), Vision)
  rng, file = np.random.default_rng(0), tmp_path / "noise.npz"
  images = rng.integers(256, size=(12, 8, 8, cfg.model.channels)).astype(np.uint8)
  np.savez(file, train_x=images, train_y=np.arange(12) % 3)
  settings = {"data.train": f"{file}:train", "data.validation": f"{file}:train", "workers": 1}
  settings |= {"log_every": 1, "run_dir": tmp_path / "run"}
  assert vision.fit(small_images(name, **settings)).step == 3
  losses = [
    row["loss"] for row in RunFolder(tmp_path / "run").read_rows() if row["kind"] == "train"
  ]
  assert len(losses) == 3 and np.isfinite(losses).all()
