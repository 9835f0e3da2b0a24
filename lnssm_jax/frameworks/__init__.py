"""The papers' frameworks as code: equations of a family of models, and what follows from them.

lnssm_jax.frameworks.recurrences(mixer, x)    what a layer feeds the recurrences inside it
lnssm_jax.frameworks.dsf     layers as linear systems with input-dependent matrices
lnssm_jax.frameworks.lcsm    expansion, oscillation, shrinkage: recurrence and backward pass
lnssm_jax.frameworks.online_learning    steps as minima of objectives
"""

from lnssm_jax.frameworks import dsf, lcsm, online_learning
from lnssm_jax.frameworks.layers import Recurrence, mix_with, recurrences

__all__ = ["Recurrence", "dsf", "lcsm", "mix_with", "online_learning", "recurrences"]
