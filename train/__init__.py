"""The trainer: `python -m train fit | evaluate | generate | tokenize | ... --config FILE`.

It runs from a checkout of the repository and is not part of the installed package `lnssm_jax`.
In notebooks, `train.load_model(path)` loads the model of a run folder or an exported model.
"""

from typing import Any

__all__ = ["LoadedModel", "load_model"]


def __getattr__(name: str) -> Any:
  # Lazy, so that the command line's --help does not import JAX.
  if name not in __all__:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  from train.runs import loading

  return getattr(loading, name)
