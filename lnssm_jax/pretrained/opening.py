"""A model from a folder of any kind: our exports and published models."""

from pathlib import Path

import jax
from flax import nnx

from lnssm_jax.files.buckets import fetched
from lnssm_jax.files.printable import shell_word
from lnssm_jax.models.settings import graph_of
from lnssm_jax.pretrained import exports, folders, hugging_face
from lnssm_jax.pretrained.exports import ExportError
from lnssm_jax.pretrained.loaded import LoadedModel
from lnssm_jax.pretrained.rwkv_tokenizer import tokenizer_of


def load_model(folder: str | Path, *, tokenizer: str | Path | None = None) -> LoadedModel:
  """Loads an exported or a published model onto the first device of this process.

      loaded = lnssm_jax.load_model("exported")
      loaded = lnssm_jax.load_model("RWKV-x070.pth", tokenizer="rwkv_vocab_v20230424.txt")

  `lnssm_jax.pretrained.load` has options for published models. `train.load_model`, in a checkout,
  also opens run folders.

  Args:
    tokenizer: a file in place of the model's own, as in `lnssm_jax.pretrained.load`.

  Raises:
    DataError: the file of `tokenizer` is missing or unusable.
    ExportError: `folder` is no exported model, or it is damaged or inconsistent.
  """
  folder = fetched(folder)
  if not exports.is_exported(folder) and folders.is_published(folder):
    return hugging_face.load(folder, tokenizer=tokenizer)
  if not exports.is_exported(folder):
    raise ExportError(not_exported(folder))
  manifest, arrays = exports.read(folder)
  params = jax.device_put(arrays, jax.local_devices()[0])
  model = nnx.merge(graph_of(manifest.model), params)
  settings = {"model": manifest.model, **manifest.settings}
  own = None if tokenizer is None else tokenizer_of(tokenizer)
  stored = lambda: own or exports.tokenizer_of(folder, manifest)
  return LoadedModel(model, settings, manifest.step, folder, lambda: manifest.metrics, stored)


def not_exported(folder: Path) -> str:
  """Message about a folder without a manifest: what was looked for, and what to do."""
  if not folder.is_dir():
    return f"there is no folder {folder}; give one that `lnssm-train export` wrote."
  if (folder / "config.json").is_file() and (folder / "checkpoints").is_dir():
    return (
      f"{folder} is a run folder, not an exported model: use train.load_model({str(folder)!r}), "
      f"or export it: lnssm-train export {shell_word(folder)} --out EXPORTED"
    )
  if (folder / folders.ADAPTER).is_file():
    return (
      f"{folder} is an adapter, of corrections alone: add it to its model by pretrained.load(MODEL,"
      f" adapter={str(folder)!r}), and save that."
    )
  inside = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
  return (
    f"{folder} is no exported model: it was searched for {exports.MANIFEST} (with "
    f"{exports.TENSORS}, of an exported model), for config.json and checkpoints/ (of a run), and "
    f"for config.json and safetensors files (of a published model); "
    f"it has {inside}."
  )
