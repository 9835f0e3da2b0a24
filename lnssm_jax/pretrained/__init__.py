"""Models in folders: exports as safetensors with a manifest, their tokenizers, text in and out.

    loaded = lnssm_jax.load_model("exported")   # prints itself briefly
    loaded.model, loaded.settings, loaded.metrics, loaded.tokenizer
    loaded.generate("def ", max_tokens=50)
    loaded.score("def f(x): return x").log_probs

`python -m train export` writes such folders. Everything read is checked. NumPy, JAX and Flax
suffice; a tokenizer other than "bytes" needs the package `tokenizers`.
"""

import importlib
from typing import TYPE_CHECKING

__all__ = [
  "DataError",
  "ExportError",
  "LoadedModel",
  "Score",
  "lm_eval_model",
  "load_model",
  "score",
]
_HOMES = {
  "DataError": "files",
  "ExportError": "manifest",
  "LoadedModel": "loaded",
  "Score": "texts",
  "lm_eval_model": "harness",
  "load_model": "loaded",
  "score": "loaded",
}

if TYPE_CHECKING:
  from lnssm_jax.pretrained.files import DataError
  from lnssm_jax.pretrained.harness import lm_eval_model
  from lnssm_jax.pretrained.loaded import LoadedModel, load_model, score
  from lnssm_jax.pretrained.manifest import ExportError
  from lnssm_jax.pretrained.texts import Score
else:

  def __getattr__(name: str):
    # Lazy, so that tokenizing text imports no JAX.
    if name in _HOMES:
      return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
