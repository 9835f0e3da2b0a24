"""The trainer: `lnssm-train fit | evaluate | generate | tokenize | ... --config FILE`.

It is installed with `lnssm_jax`, and needs the extra `train` (`pip install ".[train]"`).
`python -m train` is the same command, where the working directory has no `train.py` of its own. In
notebooks and scripts:

    train.fit(cfg)                    # trains, or resumes; cfg is a `train.config.Train`
    loaded = train.load_model(path)   # of a run folder, an exported or published model
    train.export(run_dir, "exported")
    train.inspect(path)               # what `lnssm-train inspect --json` prints
"""

from typing import TYPE_CHECKING

from lnssm_jax.lazy import names_of

__all__ = ["LoadedModel", "export", "fit", "inspect", "load_model"]

if TYPE_CHECKING:
  from train.inspection.report import report as inspect
  from train.runs.export import export_run as export
  from train.runs.loading import LoadedModel, load_model
  from train.trainer import fit
else:  # lazy, so that the command line's --help does not import JAX
  __getattr__, __dir__ = names_of(
    __name__,
    {
      "LoadedModel": "train.runs.loading",
      "export": "train.runs.export:export_run",
      "fit": "train.trainer",
      "inspect": "train.inspection.report:report",
      "load_model": "train.runs.loading",
    },
  )
