"""Reading runs and exports whose mixers had other names of options and parameters.

`FORMAT` is stored in config.json, in the metadata of checkpoints and in the manifest of exports.
Version 1, without a number except in manifests, is from before the renames listed in
`lnssm_jax.mixers.migration`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict

from lnssm_jax.files.reading import FORMAT
from lnssm_jax.mixers import migration

__all__ = ["FORMAT", "current_model", "current_path", "old_path", "rename"]

Path = tuple[str, ...]


def current_model(values: Mapping[str, Any]) -> dict[str, Any]:
  """Converts the stored settings of a model from version 1: options get their current names."""
  mixer, options = values.get("mixer"), values.get("mixer_options")
  if not isinstance(options, dict):  # its check comes later
    return dict(values)
  if isinstance(mixer, str):
    options = migration.renamed_options(mixer, options)
  else:
    named = {name: inner for name, inner in options.items() if isinstance(inner, dict)}
    named = {name: migration.renamed_options(name, inner) for name, inner in named.items()}
    options = options | named
  return {**values, "mixer_options": options}


def current_path(path: Path, mixer: Any) -> Path:
  """Current path of a parameter of version 1 in a model whose mixer, or pattern, is `mixer`."""
  return _renamed(path, mixer, migration.renamed_parameter)


def old_path(path: Path, mixer: Any) -> Path:
  """Inverse of `current_path`."""

  def old_name(name: str, path: str) -> str:
    table = migration.RENAMED_PARAMETERS.get(name, {})
    return {new: old for old, new in table.items()}.get(path, path)

  return _renamed(path, mixer, old_name)


def rename(tree: Any, rule: Callable[[Path, Any], Path], mixer: Any) -> Any:
  """Applies `current_path` or `old_path` to every leaf of parameters or of an optimizer's state."""
  if isinstance(tree, dict):
    flat = flatten_dict(tree, keep_empty_nodes=True)
    return unflatten_dict({rule(path, mixer): rename(x, rule, mixer) for path, x in flat.items()})
  if isinstance(tree, tuple):
    values = [rename(x, rule, mixer) for x in tree]
    return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
  return tree


def _renamed(path: Path, mixer: Any, name_of: Callable[[str, str], str]) -> Path:
  """`blocks/mixer/PATH`, or `blocks/2/mixer/PATH` in a pattern, with PATH renamed."""
  if "blocks" not in path or "mixer" not in path:
    return path
  start = path.index("mixer") + 1
  place = path[path.index("blocks") + 1]
  name = mixer if isinstance(mixer, str) else mixer[int(place)]
  return (*path[:start], *name_of(name, "/".join(path[start:])).split("/"))
