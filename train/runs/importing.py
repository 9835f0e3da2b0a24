"""Import of an exported or a published model: `lnssm-train import FOLDER --config FILE`."""

import dataclasses
from pathlib import Path

import jax

from lnssm_jax.files.atomic import new_folder
from lnssm_jax.files.buckets import fetched
from lnssm_jax.models.settings import params_of
from lnssm_jax.pretrained import exports, folders, hugging_face, opening
from lnssm_jax.pretrained.manifest import NO_TOKENIZER
from train import config
from train.checkpoint.store import Checkpoints, check_structure
from train.cluster.device_mesh import make_mesh
from train.data.tokenizers import FileTokenizer, Tokenizer, tokenizer_of
from train.runs import export
from train.runs.run_folder import RunFolder
from train.step.state import abstract_state, init_state


def import_model(folder: str | Path, cfg: config.Train) -> int:
  """Creates the run `cfg.run_dir` at step 0 with the parameters of `folder` and a new optimizer.

  `fit` continues from there, on any mesh; `generate` and `evaluate` work immediately. The run
  folder is created atomically. A published model is one with config.json and safetensors files;
  `config.published_model` gives its settings.

  Returns:
    Number of steps for which the model had been trained.

  Raises:
    ExportError: `folder` is damaged or has another model or tokenizer than `cfg`, or the run folder
      exists already.
    DataError: the tokenizer of `cfg` is missing.
    OSError: the run folder cannot be written.
  """
  folder = fetched(folder)
  if not exports.is_exported(folder) and folders.is_published(folder):
    tokenizer = _checked_published(folder, cfg)
    dtype = cfg.model.param_dtype
    read = lambda: (0, params_of(hugging_face.load(folder, param_dtype=dtype).model))
  elif not folder.is_dir():
    raise exports.ExportError(
      f"there is no folder {folder}; give one that `lnssm-train export` wrote, or a published"
      " model."
    )
  elif not exports.is_exported(folder):
    raise exports.ExportError(opening.not_exported(folder))
  else:
    manifest = exports.checked_manifest(folder)[0]
    export.check_same_model(manifest, cfg.model)
    tokenizer = _checked_tokenizer(folder, manifest, cfg)
    read = lambda: (manifest.step, exports.read(folder)[1])
  with new_folder(cfg.run_dir, exports.ExportError) as partial:
    step, params = read()
    one_device = dataclasses.replace(cfg, mesh=config.Mesh(data=1))
    mesh = make_mesh(one_device)
    abstract = abstract_state(one_device, mesh)
    check_structure(folder, params, abstract["params"])
    params = jax.tree.map(
      lambda x, like: jax.device_put(x, like.sharding), params, abstract["params"]
    )
    state = init_state(one_device, mesh, params=params)
    run = RunFolder(partial)
    run.write_config(cfg)  # first: its id is in the digests
    with Checkpoints(run.checkpoints, keep=1) as checkpoints:
      bound = {"tokenizer": tokenizer.fingerprint, "config": config.to_dict(cfg)}
      metadata = {"data_position": 0, "data": None, **bound}
      checkpoints.save(0, state, metadata)
      checkpoints.wait()
  return step


def _checked_published(folder: Path, cfg: config.Train) -> Tokenizer:
  """Checks that a published model is that of the config; returns the tokenizer."""
  theirs, ours = hugging_face.settings_of(folder), config.to_dict(cfg.model)
  if lines := [x for x in hugging_face.differences(theirs, ours) if "max_length" not in x]:
    raise exports.ExportError(
      f"{folder} has another model than the config (settings there, here): "
      f"{'; '.join(lines[:4])}; use model=published_model({str(folder)!r}) in the config file."
    )
  tokenizer = tokenizer_of(cfg.data)
  if (folder / folders.TOKENIZER).exists():
    end = {"eos_token_id": tokenizer.end_of_text}
    theirs = folders.tokenizer(folder, end)
    # What is put around a text is the config's choice.
    if not isinstance(tokenizer, FileTokenizer) or theirs.raw != tokenizer.raw:
      raise exports.ExportError(
        f"data.tokenizer={cfg.data.tokenizer!r} is not the tokenizer of the model; use "
        f"--set data.tokenizer={folder}, and text tokenized by it."
      )
  return tokenizer


def _checked_tokenizer(folder: Path, manifest: exports.Manifest, cfg: config.Train) -> Tokenizer:
  ours = tokenizer_of(cfg.data)
  if manifest.tokenizer["spec"] == NO_TOKENIZER:
    return ours
  theirs = exports.tokenizer_of(folder, manifest)
  if ours.fingerprint != theirs.fingerprint:
    spec = "bytes" if manifest.tokenizer["spec"] == "bytes" else str(folder / exports.TOKENIZER)
    raise exports.ExportError(
      f"data.tokenizer={cfg.data.tokenizer!r} is not the tokenizer of the model; use "
      f"--set data.tokenizer={spec}, and a data.folder with text tokenized by it."
    )
  return ours
