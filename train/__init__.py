"""The trainer: `lnssm-train fit | evaluate | generate | tokenize | ... --config FILE`.

It is installed with `lnssm_jax`, and needs the extra `train` (`pip install 'lnssm-jax[train]'`).
`python -m train` is the same command, where the working directory has no `train.py` of its own. In
notebooks and scripts:

    train.fit(cfg)                    # trains, or resumes; cfg is a `train.config.Train`
    loaded = train.load_model(path)   # of a run folder, an exported or published model
    train.export(run_dir, "exported")
    train.inspect(path)               # what `lnssm-train inspect --json` prints
"""

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["LoadedModel", "export", "fit", "inspect", "load_model"]
_HOMES = {
  "LoadedModel": ("runs.loading", "LoadedModel"),
  "export": ("runs.export", "export_run"),
  "fit": ("trainer", "fit"),
  "inspect": ("inspection.report", "report"),
  "load_model": ("runs.loading", "load_model"),
}

if TYPE_CHECKING:
  from train.inspection.report import report as inspect
  from train.runs.export import export_run as export
  from train.runs.loading import LoadedModel, load_model
  from train.trainer import fit


def __getattr__(name: str) -> Any:
  # Lazy, so that the command line's --help does not import JAX.
  if name not in __all__:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  module, attribute = _HOMES[name]
  return getattr(importlib.import_module(f"train.{module}"), attribute)


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
