"""Import of an exported model as a new run: `python -m train import FOLDER --config FILE`."""

import dataclasses
from pathlib import Path

import jax

from lnssm_jax.pretrained import exports
from train import config
from train.checkpoint.safe_files import new_folder
from train.checkpoint.store import Checkpoints, check_structure
from train.cluster.device_mesh import make_mesh
from train.data.tokenizers import Tokenizer, load_tokenizer
from train.runs import export
from train.runs.run_folder import RunFolder
from train.step.state import abstract_state, init_state


def import_model(folder: str | Path, cfg: config.Train) -> int:
  """Creates the run `cfg.run_dir` at step 0 with the parameters of `folder` and a new optimizer.

  `fit` continues from there, on any mesh; `generate` and `evaluate` work immediately. The run
  folder is created atomically.

  Returns:
    Number of steps for which the model had been trained.

  Raises:
    ExportError: `folder` is damaged or has another model or tokenizer than `cfg`, or the run folder
      exists already.
    DataError: the tokenizer of `cfg` is missing.
    OSError: the run folder cannot be written.
  """
  manifest = exports.checked_manifest(folder)[0]
  export.check_same_model(manifest, cfg.model)
  tokenizer = _checked_tokenizer(Path(folder), manifest, cfg)
  with new_folder(cfg.run_dir, exports.ExportError) as partial:
    manifest, params = exports.read(folder)
    one_device = dataclasses.replace(cfg, mesh=config.Mesh(data=1))
    mesh = make_mesh(one_device)
    abstract = abstract_state(one_device, mesh)
    check_structure(folder, params, abstract["params"])
    placed = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), params,
                          abstract["params"])  # fmt: skip
    state = init_state(one_device, mesh) | {"params": placed}
    run = RunFolder(partial)
    run.write_config(cfg)  # first: its id is in the digests
    with Checkpoints(run.checkpoints, keep=1) as checkpoints:
      bound = {"tokenizer": tokenizer.fingerprint, "config": config.to_dict(cfg)}
      metadata = {"data_position": 0, "data": None, **bound}
      checkpoints.save(0, state, metadata)
      checkpoints.wait()
  return manifest.step


def _checked_tokenizer(folder: Path, manifest: exports.Manifest, cfg: config.Train) -> Tokenizer:
  theirs = exports.tokenizer_of(folder, manifest)
  ours = load_tokenizer(cfg.data.tokenizer, cfg.data.folder)
  if ours.fingerprint != theirs.fingerprint:
    spec = "bytes" if manifest.tokenizer["spec"] == "bytes" else str(folder / exports.TOKENIZER)
    raise exports.ExportError(
      f"data.tokenizer={cfg.data.tokenizer!r} is not the tokenizer of the model; use "
      f"--set data.tokenizer={spec}, and a data.folder with text tokenized by it."
    )
  return ours
