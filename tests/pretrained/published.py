"""Folders of published models, made from the recorded ones of tests/pretrained/golden."""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from tests.peers.numbers import parameter

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path.stem for path in GOLDEN.glob("*.npz"))
REAL = sorted(path.stem for path in (GOLDEN / "real").glob("*.npz"))


class Recorded(NamedTuple):
  """The numbers that `tests/peers/record_models.py` recorded of a model."""

  config: dict[str, Any]
  tensors: dict[str, np.ndarray]
  tokens: np.ndarray  # [B, T]
  hidden: np.ndarray  # [L + 1, B, T, D]
  logits: np.ndarray  # [B, T, vocab]
  steps: np.ndarray | None  # [B, T, vocab]


@functools.cache
def recorded(case: str) -> Recorded:
  """One recorded model; its parameters are those of `numbers`."""
  with np.load(GOLDEN / f"{case}.npz") as file:
    config = json.loads(file["config"].tobytes())
    shapes = json.loads(file["shapes"].tobytes())
    arrays = {name: file[name] for name in ("tokens", "hidden", "logits")}
    steps = file["steps"] if "steps" in file.files else None
  tensors = {name: parameter(case, name, shape) for name, shape in shapes.items()}
  return Recorded(config, tensors, **arrays, steps=steps)


class Real(NamedTuple):
  """A config.json as published, tiny, and what `tests/peers/record_published.py` recorded of it."""

  source: str  # whose it is, and what wrote it
  layout: str
  config: dict[str, Any]
  tensors: dict[str, np.ndarray]
  tokens: np.ndarray  # [B, T]
  logits: np.ndarray  # [B, T, vocab]


@functools.cache
def real(case: str) -> Real:
  """One real config.json; its parameters are those of `numbers`."""
  with np.load(GOLDEN / "real" / f"{case}.npz") as file:
    source, layout = (file[name].tobytes().decode() for name in ("source", "layout"))
    config, shapes = (json.loads(file[name].tobytes()) for name in ("config", "shapes"))
    tokens, logits = file["tokens"], file["logits"]
  tensors = {name: parameter(case, name, shape) for name, shape in shapes.items()}
  return Real(source, layout, config, tensors, tokens, logits)


def write(folder: Path, case: str, *, dtype=None, config=None, tensors=None) -> Path:
  """Writes the folder of a recorded model, with other settings or tensors where given."""
  model = recorded(case)
  values = {k: v for k, v in (model.config | (config or {})).items() if v is not ...}
  arrays = {k: v for k, v in (model.tensors | (tensors or {})).items() if v is not ...}
  if dtype is not None:
    arrays = {name: x.astype(dtype) for name, x in arrays.items()}
  return write_folder(folder, values, arrays)


def write_folder(folder: Path, config: dict[str, Any], arrays: dict[str, np.ndarray]) -> Path:
  """Writes config.json and model.safetensors."""
  folder.mkdir(exist_ok=True)
  (folder / "config.json").write_text(json.dumps(config))
  arrays = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
  save_file(arrays, folder / "model.safetensors")
  return folder
