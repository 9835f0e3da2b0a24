"""The manifest of an exported model, read without JAX.

    FOLDER/
      model.safetensors   every parameter, named by its path joined with "."
      manifest.json       metadata; contains no file names
      tokenizer.json      the tokenizer, unless it is "bytes"; its files for chats, if it has them

The manifest has the settings of the model, the step, the tokenizer, package versions, for every
tensor its dtype, shape and the SHA-256 of its bytes; of the run its settings and last metrics; and
a SHA-256 of all that. `lnssm-train export` writes it.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lnssm_jax.files.printable import PrintableError
from lnssm_jax.files.reading import FORMAT as _VERSION
from lnssm_jax.files.reading import digest_of, read_json

MANIFEST, TENSORS, TOKENIZER = "manifest.json", "model.safetensors", "tokenizer.json"
FORMATS = {f"lnssm_jax model, version {n}": n for n in (1, _VERSION)}
FORMAT = list(FORMATS)[-1]
_MAX_MANIFEST = 1 << 26  # bytes
NO_TOKENIZER = "none"  # of a model that was saved without one
MAX_PATTERN = 1024  # layers of a pattern of mixers, each of which is a program of its own

# Settings of a model that do not affect its function of tokens and parameters, up to rounding.
SAME_FUNCTION = (
  "dtype",
  "matmul",
  "remat",
  "unroll",
  "initialization",
  "embedding_dropout",
  "residual_dropout",
  "drop_path",
)


class ExportError(PrintableError, ValueError):
  """Exported model that cannot be written or read; the message says why."""


@dataclasses.dataclass(frozen=True)
class Manifest:
  """Metadata of an exported model; `tensors` as in manifest.json."""

  model: dict[str, Any]  # settings of the model
  step: int
  # spec, fingerprint, end_of_text if it is not the usual token, the digest of files for a chat
  tokenizer: dict[str, str]
  tensors: dict[str, dict[str, Any]]
  parameters: dict[str, str]  # {name of a tensor: current name of the parameter}
  settings: dict[str, Any]  # of the run, without the model; empty in older exports
  metrics: list[dict[str, Any]]  # last rows of the run; empty in older exports


def is_exported(folder: str | Path) -> bool:
  """Whether `folder` looks like an exported model."""
  return (Path(folder) / MANIFEST).is_file()


def read_manifest(folder: str | Path) -> Manifest:
  """Reads the manifest of an exported model and checks it; builds no model.

  Raises:
    ExportError: damaged, or of another format version.
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
    model, step, tokenizer = values["model"], values["step"], values["tokenizer"]
    tensors, run = values["tensors"], values.get("run", {})
    if not isinstance(model, dict):
      raise TypeError("its model is not an object")
    if isinstance(model.get("mixer"), list) and len(model["mixer"]) > MAX_PATTERN:
      raise ExportError(
        f"{path}: model.mixer has {len(model['mixer'])} layers; {MAX_PATTERN} are the most."
      )
    names = {name: name for name in tensors}
    if version == 1:
      model, names = _current(model, tensors)
    for name, entry in tensors.items():
      elements(entry)
      if not isinstance(entry["dtype"], str):
        raise TypeError(f"the dtype of {name} is not a string")
    if type(step) is not int or step < 0 or any(type(x) is not str for x in tokenizer.values()):
      raise ExportError(f"{path}: step={step!r} must be a number, tokenizer={tokenizer} strings.")
    ends = {name: tokenizer[name] for name in ("end_of_text", "chat") if name in tokenizer}
    tokenizer = {name: tokenizer[name] for name in ("spec", "fingerprint")} | ends
    metrics = [dict(row) for row in run.get("metrics", [])]
    return Manifest(model, step, tokenizer, tensors, names, dict(run.get("settings", {})), metrics)
  except ExportError:
    raise
  except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
    raise ExportError(f"{path} cannot be used ({type(error).__name__}: {error}).") from error


def _current(
  model: dict[str, Any], tensors: Iterable[str]
) -> tuple[dict[str, Any], dict[str, str]]:
  """The settings and {name: current name} of a manifest of version 1."""
  from lnssm_jax.pretrained import old_formats  # imports the mixers

  model = old_formats.current_model(model)
  path = lambda name: old_formats.current_path(tuple(name.split(".")), model["mixer"])
  return model, {name: ".".join(path(name)) for name in tensors}


def elements(entry: Mapping[str, Any]) -> int:
  """Number of elements of a tensor, from its shape in the manifest."""
  return math.prod(_whole_numbers(entry["shape"]))


def _whole_numbers(shape: Iterable[Any]) -> list[int]:
  shape = list(shape)
  if len(shape) > 8 or any(type(n) is not int or not 0 <= n < 2**48 for n in shape):
    raise ValueError(f"{shape[:9]} is not a shape")
  return shape
