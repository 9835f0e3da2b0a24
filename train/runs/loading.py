"""Loading of models from run folders, exports and published folders, on one device."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from lnssm_jax.generate import SamplingOptions
from lnssm_jax.pretrained import exports, folders, opening
from lnssm_jax.pretrained.loaded import LoadedModel
from train import config
from train.checkpoint import store
from train.cluster.device_mesh import make_mesh
from train.data.tokenizers import Tokenizer
from train.messages import warn
from train.runs import bindings, bucket
from train.runs.run_folder import RunFolder, RunFolderError
from train.step.model import model_graph
from train.step.state import abstract_state

__all__ = ["LoadedModel", "load_model", "load_params", "of_run", "sampling_options"]


def load_model(path: str | Path, *, step: int | None = None, ema: bool = False) -> LoadedModel:
  """Loads the model in `path`: a run folder, an exported or a published model.

  Reads only the parameters, onto the first device of this process, whatever mesh wrote them.

  Args:
    step: checkpoint of a run; None means the newest intact one.
    ema: load the average of a run's parameters (`optimizer.ema_decay`) instead of the last ones.

  Raises:
    RunFolderError: `path` is none of these.
    StructureError: the run has no such average.
    FileNotFoundError: the run has no checkpoint (of that step).
    CheckpointError: it is damaged, or all are.
    BindingError: config.json has another model than the checkpoint.
    ExportError: an exported or published folder is damaged or inconsistent.
  """
  path = bucket.fetched(path)
  if not (exports.is_exported(path) or folders.is_published(path)):
    cfg = RunFolder(path).load_config()  # the folder may have been moved
    return of_run(dataclasses.replace(cfg, run_dir=str(path)), step=step, ema=ema)
  if ema:
    raise exports.ExportError(f"{path} is an exported model; use ema with the run, or its export.")
  found = opening.load_model(path)
  if step is not None and step != found.step:
    raise exports.ExportError(f"{path} has the model of step {found.step}, not of step {step}.")
  return found


def of_run(cfg: config.Train, *, step: int | None = None, ema: bool = False) -> LoadedModel:
  """As `load_model`, for the run in `cfg.run_dir` with config `cfg`."""
  one_device = dataclasses.replace(cfg, mesh=config.Mesh(data=1))
  params, found, metadata = load_params(one_device, make_mesh(one_device), step=step, ema=ema)
  model, run = nnx.merge(model_graph(cfg.model), params), RunFolder(cfg.run_dir)
  rows = lambda: [row for row in run.read_rows() if row["step"] <= found]
  tokenizer = lambda: bindings.checked_tokenizer(metadata, cfg.data)
  return LoadedModel(model, config.to_dict(cfg), found, run.path, rows, tokenizer)


def sampling_options(sample: config.Sample, tokenizer: Tokenizer, seed: int) -> SamplingOptions:
  """The options of `generate` for a config's text sample."""
  return SamplingOptions(
    max_tokens=sample.tokens,
    temperature=sample.temperature,
    top_k=sample.top_k,
    top_p=sample.top_p,
    seed=seed,
    stop_token=tokenizer.end_of_text,
  )


def _report_changes(run: RunFolder, step: int, metadata: dict[str, Any]) -> None:
  """Warns if config.json is not that of the checkpoint: a resumed run changes both."""
  with contextlib.suppress(RunFolderError):  # parameters alone may be there
    if changed := bindings.changed_settings(metadata, run.load_config()):
      more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
      warn(
        f"warning: {run.config_file} has changed since step {step} was saved, and is used as it"
        f" is: {'; '.join(changed[:4])}{more}"
      )


def load_params(
  cfg: config.Train, mesh: Mesh, *, step: int | None = None, ema: bool = False
) -> tuple[Any, int, dict[str, Any]]:
  """Loads the parameters of a checkpoint of `cfg.run_dir`, by default the newest, or their average.

  Returns:
    parameters, step, metadata of the checkpoint.

  Raises:
    BindingError: `cfg.model` is not the model that was trained; further errors as of `load_model`.
  """
  return load_tree(cfg, mesh, "ema" if ema else "params", step=step)


def load_tree(
  cfg: config.Train, mesh: Mesh, tree: str, *, step: int | None = None
) -> tuple[Any, int, dict[str, Any]]:
  """As `load_params`, for one tree of a checkpoint: "params", "ema" or "optimizer"."""
  run, abstract = RunFolder(cfg.run_dir), store.split(abstract_state(cfg, mesh))
  if step is None and store.newest_step(run.checkpoints) is None:
    raise run.without_checkpoint()
  if tree not in abstract:
    raise store.StructureError(
      f"the run in {cfg.run_dir} has no average of its parameters; optimizer.ema_decay makes one."
    )
  trees, found, metadata = store.load(run.checkpoints, {tree: abstract[tree]}, step=step)
  bindings.check_model(metadata, cfg.model, cfg.run_dir)
  _report_changes(run, found, metadata)
  loaded = trees[tree]
  if tree == "ema":  # float32, also where the model is not
    loaded = jax.tree.map(lambda x, like: x.astype(like.dtype), loaded, abstract["params"])
  return loaded, found, metadata
