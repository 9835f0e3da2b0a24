"""Checked reading of exported models; their format is in `lnssm_jax.pretrained.manifest`."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lnssm_jax.files.reading import digest_of
from lnssm_jax.models import settings
from lnssm_jax.pretrained import chat
from lnssm_jax.pretrained.manifest import (
  FORMAT,
  MANIFEST,
  NO_TOKENIZER,
  TENSORS,
  TOKENIZER,
  ExportError,
  Manifest,
  elements,
  is_exported,
  read_manifest,
)
from lnssm_jax.pretrained.safetensors import Tensors, is_finite
from lnssm_jax.pretrained.special_tokens import Added
from lnssm_jax.pretrained.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer

__all__ = [
  "FORMAT",
  "MANIFEST",
  "TENSORS",
  "TOKENIZER",
  "ExportError",
  "Manifest",
  "abstract_model",
  "abstract_params",
  "checked_manifest",
  "compare",
  "entry",
  "flat",
  "is_exported",
  "name_of",
  "read",
  "read_manifest",
  "tokenizer_of",
]


def checked_manifest(folder: str | Path) -> tuple[Manifest, Any]:
  """`read_manifest`, and the abstract parameters of its model.

  Raises:
    ExportError: as there, or its tensors do not match its model.
  """
  manifest, path = read_manifest(folder), Path(folder) / MANIFEST
  # Before building the model: its sizes must be plausible for the tensors of the file.
  total = sum(elements(entry) for entry in manifest.tensors.values())
  for name in ("dim", "num_layers", "vocab_size"):
    size = manifest.model.get(name)
    if type(size) is not int:
      raise ExportError(f"{path}: model.{name}={size!r} is not an integer.")
    if size > total:
      raise ExportError(f"{path}: model.{name}={size} is more than its tensors have elements.")
  abstract = abstract_params(manifest.model)
  kinds = {name: (x["dtype"], tuple(x["shape"])) for name, x in manifest.tensors.items()}
  found = {manifest.parameters[name]: kind for name, kind in kinds.items()}
  compare(str(path), found, flat(abstract))
  return manifest, abstract


def read(folder: str | Path) -> tuple[Manifest, Any]:
  """Reads the manifest and the parameters, a nested dictionary of numpy arrays, bit for bit.

  Raises:
    ExportError: something is damaged, missing, or different from the manifest.
  """
  manifest, abstract = checked_manifest(folder)
  path, arrays = Path(folder) / TENSORS, {}
  try:
    tensors = Tensors(path)
    if set(tensors) != set(manifest.tensors):
      raise ExportError(f"{path} has other tensors than {MANIFEST}.")
    for name, written in manifest.tensors.items():
      wanted = {name: (written["dtype"], tuple(written["shape"]))}
      compare(str(path), {name: tensors.kind(name)}, wanted)
      array = arrays[manifest.parameters[name]] = tensors[name]
      if entry(array) != written:
        raise ExportError(f"{path}: the content of {name} has changed since it was written.")
      if not is_finite(array):
        raise ExportError(
          f"{path}: {name} has numbers that are NaN or infinite; its training failed: export an "
          "earlier checkpoint."
        )
  except ExportError:
    raise
  except (OSError, ValueError) as error:
    raise ExportError(f"{path} cannot be read ({error}).") from error
  place = lambda keys, _: arrays[name_of(keys)]
  return manifest, jax.tree_util.tree_map_with_path(place, abstract)


def tokenizer_of(folder: str | Path, manifest: Manifest) -> Tokenizer:
  """Loads the tokenizer of an exported model.

  Raises:
    ExportError: there is none, or it is not the one that the model was trained with.
    DataError: its file is missing or unusable, or the package `tokenizers` is not installed.
  """
  spec, path = manifest.tokenizer["spec"], Path(folder) / TOKENIZER
  if spec == NO_TOKENIZER:
    raise ExportError(
      f"{folder} has no tokenizer, and text needs one; give save_model the tokenizer, or use"
      " tokens: lnssm_jax.generate.generate(loaded.model, [[1, 2, 3]], options)."
    )
  if spec not in ("bytes", TOKENIZER):
    raise ExportError(f"{folder}: the tokenizer {spec!r} is neither 'bytes' nor {TOKENIZER!r}.")
  if spec == "bytes":
    found = ByteTokenizer()
  else:
    end = manifest.tokenizer.get("end_of_text")
    found = FileTokenizer(path, follow_links=False, end_of_text=end)
    if found.fingerprint != manifest.tokenizer["fingerprint"]:
      # Older versions put nothing around a text, whatever the file says.
      found = FileTokenizer(path, follow_links=False, end_of_text=end, added=Added())
  if found.fingerprint != manifest.tokenizer["fingerprint"]:
    raise ExportError(f"{path} has changed since it was written; restore the original.")
  of_chat = manifest.tokenizer.get("chat")
  changed = isinstance(found, FileTokenizer) and digest_of(chat.files_of(found)) != of_chat
  if of_chat is not None and changed:
    raise ExportError(
      f"{folder}: the chat template, or a file of its tokens, has changed since it was written;"
      " restore the original."
    )
  return found


def abstract_model(model: Mapping[str, Any]) -> tuple[Any, Any]:
  """(static part, shapes and dtypes of the parameters as a nested dictionary) of a model.

  Raises:
    ExportError: no model can be built from the settings.
  """
  try:
    return settings.abstract_model(model)
  except (ValueError, TypeError, LookupError, OverflowError) as error:
    raise ExportError(f"no model can be built from these settings: {error}") from error


def abstract_params(model: Mapping[str, Any]) -> Any:
  """The second result of `abstract_model`."""
  return abstract_model(model)[1]


def flat(tree: Any) -> dict[str, Any]:
  """{name of a tensor: leaf} of a nested dictionary."""
  return {name_of(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def entry(x: np.ndarray) -> dict[str, Any]:
  """The manifest's entry of a tensor."""
  content = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
  return {
    "dtype": str(x.dtype),
    "shape": list(x.shape),
    "sha256": hashlib.sha256(content.data).hexdigest(),
  }


def compare(what: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
  """Raises ExportError, listing the first differences, unless names, dtypes and shapes agree."""
  has = {name: _kind(x) for name, x in found.items()}
  needs = {name: _kind(x) for name, x in wanted.items()}
  lines = [
    f"{name}: found {has.get(name, 'nothing')}, the model needs {needs.get(name, 'nothing')}"
    for name in sorted(has.keys() | needs.keys())
    if has.get(name) != needs.get(name)
  ]
  if lines:
    more = [f"... and {len(lines) - 8} more"] if len(lines) > 8 else []
    raise ExportError(f"{what} does not match the model:", *(f"  {x}" for x in lines[:8] + more))


def name_of(path: tuple[Any, ...]) -> str:
  """The name of a tensor: its keys joined by dots."""
  return jax.tree_util.keystr(path, simple=True, separator=".")


def _kind(x: Any) -> tuple[str, tuple[int, ...]]:
  return x if isinstance(x, tuple) else (str(x.dtype), tuple(x.shape))
