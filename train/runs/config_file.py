"""config.json of a run folder, read without JAX."""

import dataclasses
from pathlib import Path
from typing import Any

from lnssm_jax.files.printable import PrintableError
from lnssm_jax.files.reading import FORMAT, read_json
from train import config
from train.config.checked import did_you_mean

CONFIG = "config.json"
_MAX_BYTES = 1 << 24


class RunFolderError(PrintableError, ValueError):
  """Run folder that cannot be used for this run; the message says why and what to do."""


def read_config(path: str | Path) -> config.Train:
  """Reads the config of the run of a language model: `read` with `kind=config.Train`."""
  return read(path, config.Train)


def read[T](path: str | Path, kind: type[T]) -> T:
  """Reads the config of the run in the folder `path`, of the class `kind`; `dict`: of any run.

  Raises:
    RunFolderError: config.json is missing or unreadable, or of a run of another kind.
  """
  file = Path(path) / CONFIG
  try:
    values = read_json(file, _MAX_BYTES)
    values.pop("versions", None)
    values.pop("run", None)  # its id, which `train.checkpoint.digests` reads
    version, model = values.pop("format", 1), values.get("model")
    if version not in (1, FORMAT):
      raise ValueError(f"format={version!r}, but this version reads 1 and {FORMAT}")
    if version == 1 and isinstance(model, dict):
      from lnssm_jax.pretrained import old_formats  # imports the mixers

      values["model"] = old_formats.current_model(model)
    _check_kind(path, values, kind)
    return kind(**values)
  except RunFolderError:
    raise
  except (FileNotFoundError, NotADirectoryError):
    folder = Path(path)
    runs = [str(other.parent) for other in folder.parent.glob(f"*/{CONFIG}")]
    missing = "it has no config.json" if folder.exists() else "there is none of this name"
    if folder.is_file():
      runs = [str(folder.parent)] if (folder.parent / CONFIG).is_file() else []
      missing = "it is a file"
    raise RunFolderError(
      f"{path} is not a run folder: {missing}{did_you_mean(str(folder), runs) if runs else '.'} Use"
      " the run_dir of a run started by `lnssm-train fit`."
    ) from None
  except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
    raise RunFolderError(f"{file} is damaged: {error}") from error


def _check_kind(path: str | Path, values: dict, kind: Any) -> None:
  """Raises RunFolderError if the settings of a run are those of another class than `kind`."""
  if not dataclasses.is_dataclass(kind):
    return
  fields = dataclasses.fields(kind)
  unknown = values.keys() - {field.name for field in fields}
  without = (dataclasses.MISSING, dataclasses.MISSING)
  missing = {f.name for f in fields if (f.default, f.default_factory) == without} - values.keys()
  if "model_type" in unknown and "model" in missing:
    raise RunFolderError(
      f"{path} is the folder of a published model, not of a run; open it with"
      " lnssm_jax.pretrained.load, or make a run of it with `lnssm-train import`."
    )
  if unknown and missing:
    raise RunFolderError(
      f"{path} is a run of another program: its settings are {', '.join(sorted(unknown))}, without"
      f" {', '.join(sorted(missing))}; use the program that began it, or restore its {CONFIG} if"
      " that has changed."
    )
