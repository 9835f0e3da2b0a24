"""Loading of models from run folders and exports: parameters only, on one device."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from lnssm_jax.models import LanguageModel
from train import config
from train.checkpoint import store
from train.cluster.device_mesh import make_mesh
from train.data.tokenizers import Tokenizer, load_tokenizer
from train.runs.run_folder import RunFolder
from train.step.model import model_graph
from train.step.state import abstract_state


@dataclasses.dataclass(frozen=True)
class LoadedModel:
  """A trained model with its config and tokenizer.

  Attributes:
    model: the model with its parameters, on one device.
    config: config of the model.
    step: number of training steps.
    sample: text-generation settings of its run; the defaults for an exported model.
  """

  model: LanguageModel
  config: config.Model
  step: int
  sample: config.Sample
  _tokenizer: Callable[[], Tokenizer] = dataclasses.field(repr=False)

  def tokenizer(self) -> Tokenizer:
    """Loads its tokenizer, lazily because a model is useful without one.

    Raises:
      DataError: it is missing (a run's is stored in `data.folder`) or unusable.
    """
    return self._tokenizer()


def load_model(path: str | Path, *, step: int | None = None) -> LoadedModel:
  """Loads the model in `path`, a run folder or a folder written by `python -m train export`.

  Reads only the parameters, onto the first device of this process, whatever mesh wrote them.

  Args:
    step: checkpoint of a run; None means the newest intact one.

  Raises:
    RunFolderError: `path` is neither.
    FileNotFoundError: the run has no checkpoint (of that step).
    CheckpointError: it is damaged, or all are.
    ExportError: the exported folder is damaged or inconsistent.
  """
  from train.runs import export  # imported here because training does not need safetensors

  path = Path(path)
  if not export.is_exported(path):
    cfg = RunFolder(path).load_config()  # the folder may have been moved
    return of_run(dataclasses.replace(cfg, run_dir=str(path)), step=step)
  manifest, arrays = export.read(path)
  if step is not None and step != manifest.step:
    raise export.ExportError(f"{path} has the model of step {manifest.step}, not of step {step}.")
  params = jax.device_put(arrays, jax.local_devices()[0])
  model = nnx.merge(model_graph(manifest.model), params)
  tokenizer = lambda: export.tokenizer_of(path, manifest)
  return LoadedModel(model, manifest.model, manifest.step, config.Sample(), tokenizer)


def of_run(cfg: config.Train, *, step: int | None = None) -> LoadedModel:
  """As `load_model`, for the run in `cfg.run_dir` with config `cfg`."""
  one_device = dataclasses.replace(cfg, mesh=config.Mesh(data=1))
  params, found = load_params(one_device, make_mesh(one_device), step=step)
  model = nnx.merge(model_graph(cfg.model), params)
  tokenizer = lambda: load_tokenizer(cfg.data.tokenizer, cfg.data.folder)
  return LoadedModel(model, cfg.model, found, cfg.sample, tokenizer)


def load_params(cfg: config.Train, mesh: Mesh, *, step: int | None = None) -> tuple[Any, int]:
  """Loads the parameters of a checkpoint of `cfg.run_dir`, by default the newest, and its step."""
  abstract = {"params": abstract_state(cfg, mesh)["params"]}
  trees, found, _ = store.load(RunFolder(cfg.run_dir).checkpoints, abstract, step=step)
  return trees["params"], found
