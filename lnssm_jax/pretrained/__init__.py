"""Models in folders: our exports, published models, their tokenizers, text in and out.

    loaded = lnssm_jax.load_model("exported")   # prints itself briefly
    loaded.model, loaded.settings, loaded.metrics, loaded.tokenizer
    loaded.generate("def ", max_tokens=50)
    loaded.score("def f(x): return x").log_probs

    loaded = lnssm_jax.pretrained.load("mamba-130m-hf", dtype=jnp.bfloat16, mesh=mesh)

`save_model` and `lnssm-train export` write our folders; `load` and `save` read and write those of
transformers, flash-linear-attention and mamba-ssm. Everything read is checked. NumPy, JAX and Flax
suffice; a tokenizer other than "bytes" needs the package `tokenizers`, and writing `safetensors`.
"""

from typing import TYPE_CHECKING

from lnssm_jax.lazy import names_of

__all__ = [
  "DataError",
  "ExportError",
  "LoadedModel",
  "Score",
  "lm_eval_model",
  "load",
  "load_model",
  "load_prefix",
  "save",
  "save_adapter",
  "save_model",
  "save_prefix",
  "score",
]
_HOMES = {
  "DataError": "lnssm_jax.files.reading",
  "ExportError": "lnssm_jax.pretrained.manifest",
  "LoadedModel": "lnssm_jax.pretrained.loaded",
  "Score": "lnssm_jax.pretrained.texts",
  "lm_eval_model": "lnssm_jax.pretrained.harness",
  "load": "lnssm_jax.pretrained.hugging_face",
  "load_model": "lnssm_jax.pretrained.opening",
  "load_prefix": "lnssm_jax.pretrained.prefixes",
  "save": "lnssm_jax.pretrained.hugging_face",
  "save_adapter": "lnssm_jax.pretrained.hugging_face",
  "save_model": "lnssm_jax.pretrained.saving",
  "save_prefix": "lnssm_jax.pretrained.prefixes",
  "score": "lnssm_jax.pretrained.loaded",
}

if TYPE_CHECKING:
  from lnssm_jax.files.reading import DataError
  from lnssm_jax.pretrained.harness import lm_eval_model
  from lnssm_jax.pretrained.hugging_face import load, save, save_adapter
  from lnssm_jax.pretrained.loaded import LoadedModel, score
  from lnssm_jax.pretrained.manifest import ExportError
  from lnssm_jax.pretrained.opening import load_model
  from lnssm_jax.pretrained.prefixes import load_prefix, save_prefix
  from lnssm_jax.pretrained.saving import save_model
  from lnssm_jax.pretrained.texts import Score
else:  # lazy, so that tokenizing text imports no JAX
  __getattr__, __dir__ = names_of(__name__, _HOMES)
