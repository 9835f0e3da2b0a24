"""Models as safetensors with a manifest: written from a run, checked when they are read.

    FOLDER/
      model.safetensors   every parameter, named by its path joined with "."
      manifest.json       what they are; nothing in it names a file
      tokenizer.json      the tokenizer, if it is not "bytes"

The manifest holds the settings of the model, the step, the tokenizer, the version of each package,
for every tensor its dtype, shape and the SHA-256 of its bytes, and the SHA-256 of all that.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from train import config, run_folder
from train.data.tokenizers import FileTokenizer, Tokenizer, load_tokenizer
from train.digests import digest_of
from train.files import new_folder, read_json, regular_file
from train.step import build_model

MANIFEST, TENSORS, TOKENIZER = "manifest.json", "model.safetensors", "tokenizer.json"
FORMAT = "lnssm_jax model, version 1"
_MOST_MANIFEST = 1 << 26  # bytes
_DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16)}
# Settings of a model that do not change what its parameters are.
_FREE = ("dtype", "remat", "unroll")


class ExportError(ValueError):
  """An exported model cannot be written or read; the message says why."""


@dataclasses.dataclass(frozen=True)
class Manifest:
  """What an exported folder says about its model; `tensors` as in the file."""

  model: config.Model
  step: int
  tokenizer: dict[str, str]  # spec, fingerprint
  tensors: dict[str, dict[str, Any]]


def is_exported(folder: str | Path) -> bool:
  """Whether `folder` looks like one that `write` made."""
  return (Path(folder) / MANIFEST).is_file()


def write(
  folder: str | Path, model: config.Model, params: Any, tokenizer: Tokenizer, step: int
) -> None:
  """Makes `folder` with all that is needed to use the model; it appears whole, or not at all.

  Args:
    params: nested dictionary of arrays, as `model` needs them, each on devices of this process.

  Raises:
    ExportError: `folder` is there and holds something, or the parameters are of another model.
    OSError: it cannot be written.
  """
  arrays = {name: np.asarray(x) for name, x in _flat(params).items()}
  wanted = _flat(abstract_params(model))
  _compare("the parameters", {name: _kind(x) for name, x in arrays.items()}, wanted)
  values = {
    "format": FORMAT,
    "model": config.to_dict(model),
    "step": step,
    "tokenizer": {"spec": tokenizer.spec, "fingerprint": tokenizer.fingerprint},
    "versions": run_folder.versions(),
    "tensors": {name: _entry(x) for name, x in sorted(arrays.items())},
  }
  with new_folder(folder, ExportError) as partial:
    if isinstance(tokenizer, FileTokenizer):
      values["tokenizer"]["spec"] = TOKENIZER
      (partial / TOKENIZER).write_bytes(tokenizer.raw)
    safetensors.numpy.save_file(arrays, partial / TENSORS, metadata={"format": "flax"})
    text = json.dumps(values | {"sha256": digest_of(values)}, indent=1)
    (partial / MANIFEST).write_text(text + "\n")
    (partial / TENSORS).chmod((partial / MANIFEST).stat().st_mode & 0o777)


def read_manifest(folder: str | Path) -> Manifest:
  """The manifest of an exported folder, checked against the model that it describes; see `read`."""
  return _read_manifest(folder)[0]


def _read_manifest(folder: str | Path) -> tuple[Manifest, Any]:
  """Also the shapes of the parameters of its model.

  Raises:
    ExportError: it is damaged, or of another version, or its tensors are not those of its model.
  """
  path = Path(folder) / MANIFEST
  try:
    values = read_json(path, _MOST_MANIFEST)
    if values.pop("sha256") != digest_of(values):
      raise ExportError(f"the content of {path} has changed since it was written.")
    if values["format"] != FORMAT:
      raise ExportError(f"{path} is of format {values['format']!r}, but {FORMAT!r} is read here.")
    model, step, tokenizer = config.Model(**values["model"]), values["step"], values["tokenizer"]
    tensors = values["tensors"]
    sizes = [_size(entry) for entry in tensors.values()]
    found = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in tensors.items()}
    if type(step) is not int or step < 0 or any(type(x) is not str for x in tokenizer.values()):
      raise ExportError(f"{path}: step={step!r} must be a number, and tokenizer={tokenizer} text.")
    spec, fingerprint = tokenizer["spec"], tokenizer["fingerprint"]
  except ExportError:
    raise
  except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
    raise ExportError(f"{path} cannot be used ({type(error).__name__}: {error}).") from error
  # Before the model is built: what it says of its size must be in the file.
  for name in ("dim", "num_layers", "vocab_size"):
    if getattr(model, name) > sum(sizes):
      raise ExportError(
        f"{path}: model.{name}={getattr(model, name)} is more than its tensors hold."
      )
  abstract = abstract_params(model)
  _compare(str(path), found, _flat(abstract))
  return Manifest(model, step, {"spec": spec, "fingerprint": fingerprint}, tensors), abstract


def read(folder: str | Path) -> tuple[Manifest, Any]:
  """The manifest and the parameters, a nested dictionary of numpy arrays: every bit as written.

  Raises:
    ExportError: something is damaged, missing, or not what the manifest says.
  """
  manifest, abstract = _read_manifest(folder)
  path, arrays = Path(folder) / TENSORS, {}
  try:
    with safetensors.safe_open(regular_file(path), framework="numpy") as file:
      if set(file.keys()) != set(manifest.tensors):
        raise ExportError(f"{path} holds other tensors than {MANIFEST} says.")
      for name, entry in manifest.tensors.items():
        piece = file.get_slice(name)
        kind = (str(_DTYPES.get(piece.get_dtype(), piece.get_dtype())), tuple(piece.get_shape()))
        _compare(str(path), {name: kind}, {name: (entry["dtype"], tuple(entry["shape"]))})
        arrays[name] = file.get_tensor(name)
        if _entry(arrays[name]) != entry:
          raise ExportError(f"{path}: the content of {name} has changed since it was written.")
  except (OSError, safetensors.SafetensorError) as error:
    raise ExportError(f"{path} cannot be read ({error}).") from error
  place = lambda keys, _: arrays[_name(keys)]
  return manifest, jax.tree_util.tree_map_with_path(place, abstract)


def tokenizer_of(folder: str | Path, manifest: Manifest) -> Tokenizer:
  """The tokenizer of an exported model.

  Raises:
    ExportError: it is not the one that the model was trained with.
    DataError: its file is missing or unusable.
  """
  spec, path = manifest.tokenizer["spec"], Path(folder) / TOKENIZER
  if spec not in ("bytes", TOKENIZER):
    raise ExportError(f"{folder}: the tokenizer {spec!r} is neither 'bytes' nor {TOKENIZER!r}.")
  try:
    found = load_tokenizer("bytes") if spec == "bytes" else FileTokenizer(regular_file(path))
  except OSError as error:
    raise ExportError(f"{path} cannot be read ({error}).") from error
  if found.fingerprint != manifest.tokenizer["fingerprint"]:
    raise ExportError(f"{path} has changed since it was written; bring the original back.")
  return found


def check_same_model(manifest: Manifest, model: config.Model) -> None:
  """Raises ExportError unless `model` describes the exported model, but for how it is computed."""
  ours, theirs = config.to_dict(model), config.to_dict(manifest.model)
  lines = [
    f"model.{name}: the exported model has {theirs[name]!r}, the config {ours[name]!r}"
    for name in ours
    if name not in _FREE and ours[name] != theirs[name]
  ]
  if lines:
    raise ExportError("the config describes another model:\n  " + "\n  ".join(lines))


def abstract_params(model: config.Model) -> Any:
  """Shapes and dtypes of the parameters of the model, as a nested dictionary."""

  def build():
    return nnx.to_pure_dict(nnx.state(build_model(model, jax.random.key(0)), nnx.Param))

  try:
    return jax.eval_shape(build)
  except (ValueError, TypeError, OverflowError) as error:
    raise ExportError(f"no model can be built from these settings: {error}") from error


def _flat(tree: Any) -> dict[str, Any]:
  return {_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _name(path: tuple[Any, ...]) -> str:
  return jax.tree_util.keystr(path, simple=True, separator=".")


def _kind(x: Any) -> tuple[str, tuple[int, ...]]:
  return x if isinstance(x, tuple) else (str(x.dtype), tuple(x.shape))


def _entry(x: np.ndarray) -> dict[str, Any]:
  content = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
  return {
    "dtype": str(x.dtype),
    "shape": list(x.shape),
    "sha256": hashlib.sha256(content.data).hexdigest(),
  }


def _size(entry: dict[str, Any]) -> int:
  """Elements of a tensor, from what the manifest says of it."""
  size = 1
  for length in _whole_numbers(entry["shape"]):
    size *= length
  return size


def _whole_numbers(shape: Iterable[Any]) -> list[int]:
  shape = list(shape)
  if len(shape) > 8 or any(type(n) is not int or not 0 <= n < 2**48 for n in shape):
    raise ValueError(f"{shape[:9]} is not a shape")
  return shape


def _compare(what: str, found: dict[str, tuple], wanted: dict[str, Any]) -> None:
  """Raises ExportError, naming the first few, unless names, dtypes and shapes agree."""
  needs = {name: _kind(x) for name, x in wanted.items()}
  lines = [
    f"{name}: found {found.get(name, 'nothing')}, the model needs {needs.get(name, 'nothing')}"
    for name in sorted(found.keys() | needs.keys())
    if found.get(name) != needs.get(name)
  ]
  if lines:
    more = [f"... and {len(lines) - 8} more"] if len(lines) > 8 else []
    raise ExportError(f"{what} do not fit the model:\n  " + "\n  ".join(lines[:8] + more))
