"""Named arrays of a folder, each read when it is asked for, without JAX or Orbax.

Checkpoints are read by TensorStore, which Orbax writes them with; a tree of any Orbax checkpoint
works, its arrays named by their paths joined with ".".
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lnssm_jax.files.reading import DataError, read_json
from lnssm_jax.pretrained.safetensors import Tensors

_METADATA = "_METADATA"
_MAX_METADATA = 1 << 28  # bytes
# Where Orbax puts the tree of a checkpoint, by the way it was saved; "params" is ours.
_TREES = ("", "params", "state", "pytree", "default")


class Arrays(Protocol):
  """Arrays by name."""

  def __iter__(self) -> Iterator[str]:
    """Iterates over the names."""
    ...

  def kind(self, name: str) -> tuple[str, tuple[int, ...]]:
    """(dtype, shape) of an array, without reading it."""
    ...

  def __getitem__(self, name: str) -> np.ndarray:
    """Reads an array."""
    ...


class OrbaxArrays(Mapping[str, np.ndarray]):
  """The arrays of a tree that Orbax saved in `folder`.

  Raises:
    DataError: its metadata is damaged.
  """

  def __init__(self, folder: Path):
    self.folder = folder.absolute()
    try:
      metadata = read_json(folder / _METADATA, _MAX_METADATA)
      leaves = metadata["tree_metadata"].values()
      saved = [leaf for leaf in leaves if leaf["value_metadata"]["value_type"] not in _NO_ARRAY]
      self._names = [".".join(str(x["key"]) for x in leaf["key_metadata"]) for leaf in saved]
      self._zarr3 = bool(metadata.get("use_zarr3"))
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
      raise DataError(f"{folder / _METADATA} is damaged ({error}); use another step.") from error
    self._opened: dict[str, Any] = {}

  def _open(self, name: str) -> Any:
    import tensorstore

    if name in self._opened:
      return self._opened[name]
    place: dict[str, Any] = {"driver": "file", "path": f"{self.folder / name}/"}
    if (self.folder / "manifest.ocdbt").is_file():
      place = {"driver": "ocdbt", "base": f"file://{self.folder}/", "path": f"{name}/"}
    spec = {"driver": "zarr3" if self._zarr3 else "zarr", "kvstore": place}
    with _damage(self.folder, name):
      self._opened[name] = tensorstore.open(spec, open=True, read=True).result()
    return self._opened[name]

  def kind(self, name: str) -> tuple[str, tuple[int, ...]]:
    """(dtype, shape) of an array, without reading it."""
    array = self._open(name)
    return array.dtype.name, tuple(array.shape)

  def __getitem__(self, name: str) -> np.ndarray:
    array = self._open(name)
    with _damage(self.folder, name):
      return array.read().result()

  def __iter__(self) -> Iterator[str]:
    return iter(self._names)

  def __len__(self) -> int:
    return len(self._names)


_NO_ARRAY = ("None", "Dict", "List", "Tuple", "NamedTuple")  # empty nodes of a tree


class _damage:
  """Context that converts errors of TensorStore."""

  def __init__(self, folder: Path, name: str):
    self.where = f"{folder}: the array {name}"

  def __enter__(self) -> None: ...

  def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
    if isinstance(error, (ValueError, OSError, LookupError)):
      line = str(error).split("\n")[0][:200]
      raise DataError(f"{self.where} cannot be read ({line}); use another step.") from error


class SafetensorsArrays(Mapping[str, np.ndarray]):
  """The arrays of all safetensors files of a folder, or of one file."""

  def __init__(self, paths: list[Path]):
    self._homes: dict[str, Tensors] = {}
    for path in paths:
      try:
        tensors = Tensors(path)
      except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); restore the original.") from error
      if twice := self._homes.keys() & set(tensors):
        name = min(twice)
        raise DataError(
          f"the array {name} is in {self._homes[name].path.name} and in {path.name}; inspect one"
          " of these files alone."
        )
      self._homes |= dict.fromkeys(tensors, tensors)

  def kind(self, name: str) -> tuple[str, tuple[int, ...]]:
    """(dtype, shape) of an array, without reading it."""
    return self._homes[name].kind(name)

  def __getitem__(self, name: str) -> np.ndarray:
    return self._homes[name][name]

  def __iter__(self) -> Iterator[str]:
    return iter(self._homes)

  def __len__(self) -> int:
    return len(self._homes)


def orbax_tree(folder: Path) -> Path | None:
  """The folder of the tree of an Orbax checkpoint; None if `folder` is none."""
  places = [folder / name for name in _TREES]
  return next((place for place in places if (place / _METADATA).is_file()), None)
