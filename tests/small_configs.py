"""The models of `configs/` and `experiments/configs/` at sizes that train in a second."""

import functools
import json
import os
import runpy
from pathlib import Path
from unittest import mock

import numpy as np

from experiments.vision.settings import Vision
from train.config import Model, Train, apply_overrides, load, load_config, to_dict

ROOT = Path(__file__).parents[1]
FOLDERS = ROOT / "configs", ROOT / "experiments" / "configs"
FILES = sorted((path for folder in FOLDERS for path in folder.glob("*.py")), key=lambda x: x.name)

SMALL = {"model.dim": 16, "model.num_heads": 2, "model.vocab_size": 50, "model.dtype": "float32"}
SMALL |= {"seq_len": 16, "global_batch": 2, "accumulate": 1, "steps": 3, "model.remat": "none"}
SMALL |= {"optimizer.warmup_steps": 1, "optimizer.peak_lr": 1e-2, "optimizer.final_lr": 1e-2}
SMALL["data.tokenizer"] = "tokenizer.json"

SMALL_IMAGES = {"model.dim": 16, "model.num_layers": 1, "model.num_classes": 3}
SMALL_IMAGES |= {"model.image_size": 8, "model.patch_size": 4, "model.dtype": "float32"}
SMALL_IMAGES |= {"epochs": 1, "warmup_epochs": 0, "global_batch": 4}


def place_of(name: str) -> Path:
  """The path, with its variant, of a config that docs/configs.md names."""
  return next(folder for folder in FOLDERS if (folder / name.partition(":")[0]).exists()) / name


def variants(path: Path) -> list[str]:
  """A config file's variants, as docs/configs.md names them; of a file without any, its name."""
  with mock.patch.dict(os.environ, {"LNSSM_DATA": "folder"}):
    names = runpy.run_path(str(path), run_name="config").get("VARIANTS", ())
  return [f"{path.name}:{name}" for name in names] or [path.name]


def language_configs() -> list[str]:
  """Every variant of the language models."""
  return [name for path in FILES if path.stem != "vision" for name in variants(path)]


def image_configs() -> list[str]:
  """Every variant of the classifiers."""
  return variants(place_of("vision.py"))


def pattern_of(model: Model) -> tuple[str, ...]:
  return (model.mixer,) if isinstance(model.mixer, str) else model.mixer


def small(name: str) -> Train:
  """The config with one layer of each mixer of its pattern, and sizes that go with 16 channels."""
  with mock.patch.dict(os.environ, {"LNSSM_DATA": "folder"}):
    cfg = load_config(place_of(name))
  model, settings = cfg.model, dict(SMALL)
  settings["model.num_layers"] = len(pattern_of(model))
  if model.channel_mixer not in ("none", "identity"):
    settings["model.channel_hidden"] = 24
  if model.learned_positions:
    settings["model.learned_positions"] = 16
  if model.mixer == "mamba2":
    settings["model.mixer_options.head_dim"] = 16
  sizes = {"rotary_width": 2, "expand_v": 1.75, "state_dim": 8, "max_length": 16}
  for option, size in sizes.items():
    if option in model.mixer_options:
      settings[f"model.mixer_options.{option}"] = size
  return apply_overrides(cfg, [f"{name}={value}" for name, value in settings.items()])


def small_images(name: str, **more) -> Vision:
  """A classifier's config with one layer and images of 8 x 8 pixels, and these settings."""
  settings = SMALL_IMAGES | more
  cfg = load(place_of(name), Vision)
  return apply_overrides(cfg, [f"{name}={value}" for name, value in settings.items()])


def settings_of(name: str) -> str:
  """Settings of the model and the optimizer, as text: where they are equal, small runs are."""
  cfg = small(name)
  return json.dumps([to_dict(cfg.model), to_dict(cfg.optimizer)])


@functools.cache
def distinct() -> list[str]:
  """The language models' variants, but for those that small sizes make equal to an earlier one."""
  return list({settings_of(name): name for name in reversed(language_configs())}.values())[::-1]


def batch_of(cfg: Train) -> dict[str, np.ndarray]:
  """Random tokens; the first row has two documents."""
  B, T = cfg.global_batch, cfg.seq_len
  tokens = np.random.default_rng(0).integers(0, cfg.model.vocab_size, (B, T + 1)).astype(np.int32)
  segments = np.zeros((B, T), np.int32)
  segments[0, T // 3 :] = 1
  weights = np.ones((B, T), np.float32)
  weights[0, T // 3 - 1] = 0
  return {
    "tokens": tokens[:, :-1],
    "targets": tokens[:, 1:],
    "segment_ids": segments,
    "weights": weights,
  }
