"""Models out of run folders and exported folders, without their optimizer, on one device."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from lnssm_jax.models import LanguageModel
from train import checkpoint, config
from train.data.tokenizers import Tokenizer, load_tokenizer
from train.mesh import make_mesh
from train.run_folder import RunFolder
from train.step import abstract_state, model_graph


@dataclasses.dataclass(frozen=True)
class LoadedModel:
  """A model and what belongs to it.

  Attributes:
    model: with its parameters, on one device.
    config: the settings of the model.
    step: how many steps it was trained.
    sample: how the settings of its run generate text; the defaults for an exported model.
  """

  model: LanguageModel
  config: config.Model
  step: int
  sample: config.Sample
  _tokenizer: Callable[[], Tokenizer] = dataclasses.field(repr=False)

  def tokenizer(self) -> Tokenizer:
    """Its tokenizer. Read when it is asked for, because a model can be looked at without one.

    Raises:
      DataError: it is missing (that of a run lies in `data.folder`), or unusable.
    """
    return self._tokenizer()


def load_model(path: str | Path, *, step: int | None = None) -> LoadedModel:
  """The model in `path`, a run folder or a folder made by `python -m train export`.

  Only the parameters are read, onto the first device of this process, whatever mesh wrote them.

  Args:
    step: which checkpoint of a run; None takes the newest intact one.

  Raises:
    RunFolderError: `path` is neither.
    FileNotFoundError: the run has no checkpoint (of that step).
    CheckpointError: it is damaged, or all are.
    ExportError: the exported folder is damaged, or is not what it says.
  """
  from train import export  # not before it is needed: whoever trains needs no safetensors

  path = Path(path)
  if not export.is_exported(path):
    cfg = RunFolder(path).load_config()  # the folder may have been moved since
    return of_run(dataclasses.replace(cfg, run_dir=str(path)), step=step)
  manifest, arrays = export.read(path)
  if step is not None and step != manifest.step:
    raise export.ExportError(f"{path} holds the model of step {manifest.step}, not of step {step}.")
  params = jax.device_put(arrays, jax.local_devices()[0])
  model = nnx.merge(model_graph(manifest.model), params)
  tokenizer = lambda: export.tokenizer_of(path, manifest)
  return LoadedModel(model, manifest.model, manifest.step, config.Sample(), tokenizer)


def of_run(cfg: config.Train, *, step: int | None = None) -> LoadedModel:
  """As `load_model`, for the run in `cfg.run_dir`, whose settings `cfg` are."""
  one_device = dataclasses.replace(cfg, mesh=config.Mesh(data=1))
  params, found = load_params(one_device, make_mesh(one_device), step=step)
  model = nnx.merge(model_graph(cfg.model), params)
  tokenizer = lambda: load_tokenizer(cfg.data.tokenizer, cfg.data.folder)
  return LoadedModel(model, cfg.model, found, cfg.sample, tokenizer)


def params_of(loaded: LoadedModel) -> Any:
  """The parameters of a loaded model, a nested dictionary."""
  return nnx.to_pure_dict(nnx.state(loaded.model, nnx.Param))


def load_params(cfg: config.Train, mesh: Mesh, *, step: int | None = None) -> tuple[Any, int]:
  """The parameters of a checkpoint in `cfg.run_dir`, the newest by default, and its step."""
  abstract = {"params": abstract_state(cfg, mesh)["params"]}
  trees, found, _ = checkpoint.load(RunFolder(cfg.run_dir).checkpoints, abstract, step=step)
  return trees["params"], found
