"""Linear-time sequence models for JAX and Flax: recurrent ops, token mixers and whole models.

    import lnssm_jax

    lnssm_jax.ops       pure functions on arrays, such as `ops.linear_attention`
    lnssm_jax.mixers    Flax NNX layers [B, T, D] -> [B, T, D]
    lnssm_jax.models    language and vision models made of them
    lnssm_jax.linen     a Flax Linen face of each mixer and model
    lnssm_jax.sharding  partition specs by parameter path
    lnssm_jax.generate  sampling from a language model
    lnssm_jax.frameworks  the papers' frameworks as equations
    lnssm_jax.analysis  what a model remembers
    lnssm_jax.load_model  a trained model from a folder (lnssm_jax.pretrained)
    lnssm_jax.save_model  such a folder of a model that any loop trained
    lnssm_jax.score     how likely texts are to it

Each is imported when it is first used. The package needs JAX and Flax only, and no accelerator.
"""

from typing import TYPE_CHECKING

from lnssm_jax.lazy import names_of

__version__ = "0.1.0"
__all__ = [
  "__version__",
  "analysis",
  "frameworks",
  "generate",
  "linen",
  "load_model",
  "mixers",
  "models",
  "ops",
  "pretrained",
  "save_model",
  "score",
  "sharding",
]

if TYPE_CHECKING:
  from lnssm_jax import (
    analysis,
    frameworks,
    generate,
    linen,
    mixers,
    models,
    ops,
    pretrained,
    sharding,
  )
  from lnssm_jax.pretrained import load_model, save_model, score
else:
  _functions = dict.fromkeys(("load_model", "save_model", "score"), f"{__name__}.pretrained")
  __getattr__, __dir__ = names_of(
    __name__, {name: f"{__name__}.{name}" for name in __all__[1:]} | _functions
  )
