"""The memory of a model: its decays, states, scores and routing, as arrays.

Every function takes a `LanguageModel` and tokens [B, T], or a mixer and x [B, T, D], runs on a CPU
or a GPU in compiled programs, and returns arrays. `analysis.plots` draws them, if matplotlib is
installed. docs/analysis.md has the equations.
"""

from typing import TYPE_CHECKING

from lnssm_jax.analysis.forgetting import (
  SlowestHead,
  decays,
  half_lives,
  receptive_field,
  receptive_fields,
  slowest_head,
)
from lnssm_jax.analysis.score_maps import Law, Scores, histogram, law, score_laws, scores
from lnssm_jax.analysis.selections import Routing, routing
from lnssm_jax.analysis.states import (
  Influence,
  boundary_influence,
  document_states,
  effective_rank,
  matrices,
  recall,
  row_cosine,
  singular_value_entropy,
  state_norms,
  state_size,
)
from lnssm_jax.lazy import names_of

__all__ = [
  "Influence",
  "Law",
  "Routing",
  "Scores",
  "SlowestHead",
  "boundary_influence",
  "decays",
  "document_states",
  "effective_rank",
  "half_lives",
  "histogram",
  "law",
  "matrices",
  "plots",
  "recall",
  "receptive_field",
  "receptive_fields",
  "routing",
  "row_cosine",
  "score_laws",
  "scores",
  "singular_value_entropy",
  "slowest_head",
  "state_norms",
  "state_size",
]

if TYPE_CHECKING:
  from lnssm_jax.analysis import plots
else:
  __getattr__, __dir__ = names_of(__name__, {"plots": f"{__name__}.plots"})
