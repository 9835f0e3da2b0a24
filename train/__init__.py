"""The training stack: `python -m train fit | evaluate | generate | tokenize --config FILE`.

It runs from a checkout of the repository and is not part of the installed package `lnssm_jax`.
For notebooks: `train.load_model(path)`, of a run folder or an exported model.
"""

from typing import Any

__all__ = ["LoadedModel", "load_model"]


def __getattr__(name: str) -> Any:
  # Imported when asked for: the command line's --help need not wait for jax.
  if name not in __all__:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  from train import loading

  return getattr(loading, name)
