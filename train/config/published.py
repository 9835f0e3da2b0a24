"""The model of a published or an exported folder, for a config file."""

from pathlib import Path
from typing import Any

from train.config.schema import Model


def published_model(folder: str | Path, *, max_length: int | None = None, **changes: Any) -> Model:
  """The `Model` of a folder with config.json, as `lnssm_jax.pretrained.load` reads it.

      model=published_model("llama", max_length=4096, remat="full")

  Args:
    max_length: the length of attention's cache, in place of the longest in config.json.
    changes: settings of `Model` that are no part of the function, such as `dtype` and `remat`.

  Raises:
    ExportError: config.json has a setting that is unknown or not implemented.
  """
  from lnssm_jax.pretrained import hugging_face  # imports JAX

  settings = hugging_face.settings_of(Path(folder), max_length=max_length)
  return Model(**settings | changes)


def exported_model(folder: str | Path, **changes: Any) -> Model:
  """The `Model` of a folder that `lnssm-train export` wrote.

      model=exported_model("exported", remat="full")

  Args:
    changes: settings of `Model` that are no part of the function, such as `dtype` and `remat`.

  Raises:
    ExportError: the folder is damaged, or none that `export` wrote.
  """
  from lnssm_jax.pretrained import exports  # imports JAX

  return Model(**exports.read_manifest(folder).model | changes)
