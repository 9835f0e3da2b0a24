"""Export of models as safetensors with a manifest; `exports` reads them."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np

from lnssm_jax.files.atomic import new_folder
from lnssm_jax.files.reading import digest_of
from lnssm_jax.models import LanguageModel
from lnssm_jax.models.settings import params_of, stored
from lnssm_jax.pretrained import chat, exports, safetensors
from lnssm_jax.pretrained import special_tokens as special
from lnssm_jax.pretrained.loaded import sample_of
from lnssm_jax.pretrained.manifest import NO_TOKENIZER, ExportError
from lnssm_jax.pretrained.rwkv_tokenizer import WorldTokenizer
from lnssm_jax.pretrained.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer
from lnssm_jax.sampling import SamplingOptions


def save_model(
  folder: str | Path,
  model: LanguageModel,
  tokenizer: Tokenizer | str | Path | None = None,
  generation: SamplingOptions | None = None,
  *,
  step: int = 0,
) -> None:
  """Writes a language model that any loop trained to the new folder `folder`, atomically.

      lnssm_jax.save_model("exported", model, "bytes")
      loaded = lnssm_jax.load_model("exported")

  It is an exported model as `lnssm-train export` writes one: `load_model`, `score`, lm_eval's
  adapter, and the commands `generate`, `inspect` and `import` open it. Any model goes, with any
  mixer or pattern of them: its settings are `model.config`.

  Args:
    model: on devices of this process; or a bound Linen face. Its parameters are stored as they are,
      so an average of several is a model with that average as its parameters.
    tokenizer: "bytes", the path of a tokenizer.json, a `tokenizers.Tokenizer`, or that of a
      `LoadedModel`. Without one, the folder has a model of tokens, but not of text.
    generation: what `LoadedModel.generate` does unless a call says otherwise; its stop tokens are
      added to the end of text, and its seed is not stored.
    step: the number of training steps, for information.

  Raises:
    ExportError: `folder` exists and is not empty, a parameter is NaN or infinite, the package
      safetensors is missing, or the parameters are not those of `model.config`, as after a layer
      was replaced by hand.
    DataError: the tokenizer's file is missing or unusable.
    ValueError: `model` is no language model, the tokenizer has more tokens than its vocabulary, or
      a mixer is a class without a name (`mixers.register`).
    OSError: the folder cannot be written.
  """
  found: Any = model
  found = found.module() if hasattr(found, "module") else found
  if not isinstance(found, LanguageModel):
    raise ValueError(
      f"model is of the class {type(model).__name__}; give a models.LanguageModel, or a bound Linen"
      " face of one; save other modules by Orbax, as any of Flax."
    )
  tokenizer = _tokenizer(tokenizer)
  if tokenizer is not None and tokenizer.vocab_size > found.vocab_size:
    raise ValueError(
      f"tokenizer has {tokenizer.vocab_size} tokens, and the model's vocabulary "
      f"{found.vocab_size}; give the tokenizer that it was trained with."
    )
  # An average may be of another type than what it is of.
  config = dataclasses.replace(found.config, param_dtype=found.embedding.dtype.name)
  params = params_of(found)
  for name, x in exports.flat(params).items():
    if not safetensors.is_finite(np.asarray(x)):
      raise ExportError(f"{name} has numbers that are NaN or infinite; save an earlier model.")
  settings = {} if generation is None else {"sample": sample_of(generation)}
  write(folder, stored(config), params, tokenizer, step, settings=settings)


def write(
  folder: str | Path,
  model: Mapping[str, Any],
  params: Any,
  tokenizer: Tokenizer | None,
  step: int,
  *,
  settings: Mapping[str, Any] | None = None,
  metrics: list[dict[str, Any]] | None = None,
  versions: Mapping[str, str | None] | None = None,
) -> None:
  """Writes an exported model to the new folder `folder`, atomically.

  Args:
    model: settings of the model, as JSON.
    params: its parameters, a nested dictionary of arrays on devices of this process.
    settings: of its run.
    metrics: rows of its run.
    versions: of the packages; None takes those of this one, jax and flax.

  Raises:
    ExportError: `folder` exists and is not empty, or the parameters do not match `model`.
    OSError: it cannot be written.
  """
  arrays = {name: np.asarray(x) for name, x in exports.flat(params).items()}
  wanted = exports.flat(exports.abstract_params(model))
  exports.compare("the tree of parameters", arrays, wanted)
  of_tokenizer = {"spec": NO_TOKENIZER, "fingerprint": NO_TOKENIZER}
  if not isinstance(tokenizer, WorldTokenizer | None):  # that of World is given to `load_model`
    of_tokenizer = {"spec": tokenizer.spec, "fingerprint": tokenizer.fingerprint}
  values = {
    "format": exports.FORMAT,
    "model": model,
    "step": step,
    "tokenizer": of_tokenizer,
    "versions": versions or _versions(),
    "tensors": {name: exports.entry(x) for name, x in sorted(arrays.items())},
    "run": {"settings": settings or {}, "metrics": metrics or []},
  }
  with new_folder(folder, ExportError) as partial:
    if isinstance(tokenizer, FileTokenizer):
      of_tokenizer["spec"] = exports.TOKENIZER
      if tokenizer.named_end is not None:
        of_tokenizer["end_of_text"] = tokenizer.named_end
      if files := chat.write_tokenizer(partial, tokenizer):
        of_tokenizer["chat"] = digest_of(files)
      written = FileTokenizer(partial / exports.TOKENIZER, end_of_text=tokenizer.named_end)
      of_tokenizer["fingerprint"] = written.fingerprint
    tensors, manifest = partial / exports.TENSORS, partial / exports.MANIFEST
    safetensors.write(tensors, arrays, {"format": "flax"})
    text = json.dumps(values | {"sha256": digest_of(values)}, indent=1)
    manifest.write_text(text + "\n")


def _tokenizer(given: Any) -> Tokenizer | None:
  if isinstance(given, WorldTokenizer):
    raise ValueError(
      f"tokenizer {given.spec} is a vocabulary of RWKV World, which no export has; leave it out and"
      " give it again: load_model(folder, tokenizer=...)."
    )
  if given is None or hasattr(given, "fingerprint"):
    return given
  if hasattr(given, "to_str"):  # of the package tokenizers
    path = Path("the tokenizer", exports.TOKENIZER)  # with nothing next to it
    return FileTokenizer(path, raw=given.to_str().encode())
  if not isinstance(given, str | Path):
    raise ValueError(
      f"tokenizer is of the class {type(given).__name__}; give 'bytes', the path of a "
      "tokenizer.json, a tokenizers.Tokenizer, or the tokenizer of a LoadedModel."
    )
  if given == "bytes":
    return ByteTokenizer()
  path = Path(given)
  if not path.is_dir():
    return FileTokenizer(path)
  end = special.token_of(special.read_settings(path, follow_links=True), "eos_token")
  return FileTokenizer(path / exports.TOKENIZER, end_of_text=end)


def _versions() -> dict[str, str | None]:
  import lnssm_jax

  versions = {"jax": jax.__version__, "flax": flax.__version__}
  return {"lnssm_jax": lnssm_jax.__version__, **versions}
