"""Export of models as safetensors with a manifest, and checked reading of them.

    FOLDER/
      model.safetensors   every parameter, named by its path joined with "."
      manifest.json       metadata; contains no file names
      tokenizer.json      the tokenizer, unless it is "bytes"

The manifest has the config of the model, the step, the tokenizer, package versions, for every
tensor its dtype, shape and the SHA-256 of its bytes, and a SHA-256 of all that.
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

from train import config
from train.checkpoint import old_formats
from train.checkpoint.digests import digest_of
from train.checkpoint.safe_files import new_folder, read_json, regular_file
from train.config.versions import versions
from train.data.tokenizers import FileTokenizer, Tokenizer, load_tokenizer
from train.step.model import build_model, params_of

MANIFEST, TENSORS, TOKENIZER = "manifest.json", "model.safetensors", "tokenizer.json"
FORMATS = {f"lnssm_jax model, version {n}": n for n in (1, old_formats.FORMAT)}
FORMAT = list(FORMATS)[-1]
_MAX_MANIFEST = 1 << 26  # bytes
_DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16)}
# Settings of a model that do not affect its parameters.
_FREE = ("dtype", "remat", "unroll")


class ExportError(ValueError):
  """Exported model that cannot be written or read; the message says why."""


@dataclasses.dataclass(frozen=True)
class Manifest:
  """Metadata of an exported model; `tensors` as in manifest.json."""

  model: config.Model
  step: int
  tokenizer: dict[str, str]  # spec, fingerprint
  tensors: dict[str, dict[str, Any]]
  parameters: dict[str, str]  # {name of a tensor: current name of the parameter}


def is_exported(folder: str | Path) -> bool:
  """Whether `folder` looks like an exported model."""
  return (Path(folder) / MANIFEST).is_file()


def write(
  folder: str | Path, model: config.Model, params: Any, tokenizer: Tokenizer, step: int
) -> None:
  """Writes an exported model to the new folder `folder`, atomically.

  Args:
    params: parameters of `model`, a nested dictionary of arrays on devices of this process.

  Raises:
    ExportError: `folder` exists and is not empty, or the parameters do not match `model`.
    OSError: it cannot be written.
  """
  arrays = {name: np.asarray(x) for name, x in _flat(params).items()}
  wanted = _flat(abstract_params(model))
  _compare("the tree of parameters", {name: _kind(x) for name, x in arrays.items()}, wanted)
  values = {
    "format": FORMAT,
    "model": config.to_dict(model),
    "step": step,
    "tokenizer": {"spec": tokenizer.spec, "fingerprint": tokenizer.fingerprint},
    "versions": versions(),
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
  """Reads the manifest of an exported model and checks it; raises as `read`."""
  return _read_manifest(folder)[0]


def _read_manifest(folder: str | Path) -> tuple[Manifest, Any]:
  """Returns the manifest and the abstract parameters of its model.

  Raises:
    ExportError: damaged, of another format version, or with tensors that do not match its model.
  """
  path = Path(folder) / MANIFEST
  try:
    values = read_json(path, _MAX_MANIFEST)
    if values.pop("sha256") != digest_of(values):
      raise ExportError(f"the content of {path} has changed since it was written.")
    version = FORMATS.get(values["format"])
    if version is None:
      raise ExportError(
        f"{path} has format {values['format']!r}, but this version reads {', '.join(FORMATS)}."
      )
    settings, step, tokenizer = values["model"], values["step"], values["tokenizer"]
    tensors = values["tensors"]
    model = config.Model(**(old_formats.current_model(settings) if version == 1 else settings))
    names = {name: _current_name(name, model) if version == 1 else name for name in tensors}
    sizes = [_size(entry) for entry in tensors.values()]
    found = {names[name]: (x["dtype"], tuple(x["shape"])) for name, x in tensors.items()}
    if type(step) is not int or step < 0 or any(type(x) is not str for x in tokenizer.values()):
      raise ExportError(f"{path}: step={step!r} must be a number, tokenizer={tokenizer} strings.")
    spec, fingerprint = tokenizer["spec"], tokenizer["fingerprint"]
  except ExportError:
    raise
  except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
    raise ExportError(f"{path} cannot be used ({type(error).__name__}: {error}).") from error
  # Before building the model: its sizes must be plausible for the tensors of the file.
  for name in ("dim", "num_layers", "vocab_size"):
    if getattr(model, name) > sum(sizes):
      raise ExportError(
        f"{path}: model.{name}={getattr(model, name)} is more than its tensors have elements."
      )
  abstract = abstract_params(model)
  _compare(str(path), found, _flat(abstract))
  tokenizer = {"spec": spec, "fingerprint": fingerprint}
  return Manifest(model, step, tokenizer, tensors, names), abstract


def read(folder: str | Path) -> tuple[Manifest, Any]:
  """Reads the manifest and the parameters, a nested dictionary of numpy arrays, bit for bit.

  Raises:
    ExportError: something is damaged, missing, or different from the manifest.
  """
  manifest, abstract = _read_manifest(folder)
  path, arrays = Path(folder) / TENSORS, {}
  try:
    with safetensors.safe_open(regular_file(path), framework="numpy") as file:
      if set(file.keys()) != set(manifest.tensors):
        raise ExportError(f"{path} has other tensors than {MANIFEST}.")
      for name, entry in manifest.tensors.items():
        piece = file.get_slice(name)
        kind = (str(_DTYPES.get(piece.get_dtype(), piece.get_dtype())), tuple(piece.get_shape()))
        _compare(str(path), {name: kind}, {name: (entry["dtype"], tuple(entry["shape"]))})
        array = arrays[manifest.parameters[name]] = file.get_tensor(name)
        if _entry(array) != entry:
          raise ExportError(f"{path}: the content of {name} has changed since it was written.")
  except (OSError, safetensors.SafetensorError) as error:
    raise ExportError(f"{path} cannot be read ({error}).") from error
  place = lambda keys, _: arrays[_name(keys)]
  return manifest, jax.tree_util.tree_map_with_path(place, abstract)


def tokenizer_of(folder: str | Path, manifest: Manifest) -> Tokenizer:
  """Loads the tokenizer of an exported model.

  Raises:
    ExportError: it is not the tokenizer that the model was trained with.
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
    raise ExportError(f"{path} has changed since it was written; restore the original.")
  return found


def check_same_model(manifest: Manifest, model: config.Model) -> None:
  """Raises ExportError unless `model` has the same parameters and function as the export."""
  ours, theirs = config.to_dict(model), config.to_dict(manifest.model)
  lines = [
    f"model.{name}: {theirs[name]!r} in the exported model, {ours[name]!r} in the config"
    for name in ours
    if name not in _FREE and ours[name] != theirs[name]
  ]
  if lines:
    raise ExportError("the config describes another model:\n  " + "\n  ".join(lines))


def abstract_params(model: config.Model) -> Any:
  """Shapes and dtypes of the parameters of `model`, as a nested dictionary."""
  try:
    return jax.eval_shape(lambda: params_of(build_model(model, jax.random.key(0))))
  except (ValueError, TypeError, OverflowError) as error:
    raise ExportError(f"no model can be built from these settings: {error}") from error


def _flat(tree: Any) -> dict[str, Any]:
  return {_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _name(path: tuple[Any, ...]) -> str:
  return jax.tree_util.keystr(path, simple=True, separator=".")


def _current_name(name: str, model: config.Model) -> str:
  """Current name of a parameter of a manifest of version 1."""
  return ".".join(old_formats.current_path(tuple(name.split(".")), model.mixer))


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
  """Number of elements of a tensor, from its shape in the manifest."""
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
  """Raises ExportError, listing the first differences, unless names, dtypes and shapes agree."""
  needs = {name: _kind(x) for name, x in wanted.items()}
  lines = [
    f"{name}: found {found.get(name, 'nothing')}, the model needs {needs.get(name, 'nothing')}"
    for name in sorted(found.keys() | needs.keys())
    if found.get(name) != needs.get(name)
  ]
  if lines:
    more = [f"... and {len(lines) - 8} more"] if len(lines) > 8 else []
    raise ExportError(f"{what} does not match the model:\n  " + "\n  ".join(lines[:8] + more))
