"""The papers' frameworks as code: equations of a family of models, and what follows from them.

    lnssm_jax.frameworks.dsf     layers as linear systems with input-dependent matrices
    lnssm_jax.frameworks.online_learning    steps as minima of objectives
    lnssm_jax.frameworks.lcsm    expansion, oscillation, shrinkage: recurrence and backward pass

Each is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING

__all__ = ["dsf", "lcsm", "online_learning"]

if TYPE_CHECKING:
  from lnssm_jax.frameworks import dsf, lcsm, online_learning
else:

  def __getattr__(name: str):
    if name in __all__:
      return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
