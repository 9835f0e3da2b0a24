"""Export of models as safetensors with a manifest; `lnssm_jax.pretrained.exports` reads them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lnssm_jax.files.atomic import new_folder
from lnssm_jax.files.buckets import local
from lnssm_jax.mixers import expand_partitions
from lnssm_jax.pretrained import chat, exports, hugging_face, saving
from lnssm_jax.pretrained.exports import ExportError, Manifest
from train import config
from train.cluster.device_mesh import make_mesh
from train.config.changes import model_differences
from train.config.versions import versions
from train.data.tokenizers import FileTokenizer, Tokenizer
from train.runs import loading
from train.runs.rows import Row
from train.runs.run_folder import RunFolder
from train.step import lora
from train.step.model import params_of

# Settings of a run that belong to the machine.
_LOCAL = ("model", "run_dir", "compile_cache", "mesh", "watch")


def write(
  folder: str | Path,
  model: config.Model,
  params: Any,
  tokenizer: Tokenizer,
  step: int,
  *,
  run: config.Train | None = None,
  metrics: list[Row] | None = None,
) -> None:
  """Writes an exported model to the new folder `folder`, atomically.

  Args:
    params: parameters of `model`, a nested dictionary of arrays on devices of this process.
    run: the config it was trained with, stored without the paths of this machine.
    metrics: the rows of its metrics.jsonl up to `step`; the last of each kind and set are stored.

  Raises:
    ExportError: `folder` exists and is not empty, or the parameters do not match `model`.
    OSError: it cannot be written.
  """
  written = {"settings": _portable(run), "metrics": _last(metrics or []), "versions": versions()}
  saving.write(folder, config.to_dict(model), params, tokenizer, step, **written)


def export_run(
  folder: str | Path,
  out: str | Path,
  *,
  step: int | None = None,
  ema: bool = False,
  layout: str | None = None,
  partitions: Mapping[str, Any] | None = None,
) -> Manifest | None:
  """Writes the model of a run to the new folder `out`; arguments and errors as of `load_model`.

  Args:
    partitions: arguments of `mixers.expand_partitions`, to write a model with more partitions in
      its layers of SSE.
    layout: "hf", "fla" or "mamba_ssm" for a folder that these projects open, with the same
      function (`lnssm_jax.pretrained.save`); "peft" for the corrections of a run with
      `optimizer.lora_rank` alone, as an adapter (`save_adapter`). These have no manifest.

  Raises:
    ExportError: `out` exists and is not empty, or no model of that layout has the same function.
    ValueError: the model cannot be expanded as `partitions` says.
  """
  run = RunFolder(folder).load_config()
  if layout == "peft":
    return _export_adapter(dataclasses.replace(run, run_dir=str(folder)), out, step)
  loaded = loading.of_run(dataclasses.replace(run, run_dir=str(folder)), step=step, ema=ema)
  params, tokenizer, rows = params_of(loaded.model), loaded.tokenizer, loaded.metrics
  model = run.model
  if partitions is not None:
    params, model = _expanded(params, model, partitions)
  if layout is not None:
    settings, options = config.to_dict(model), {"end_of_text": tokenizer.end_of_text}
    with new_folder(out, ExportError) as partial:
      hugging_face.save(partial, params, settings, layout=layout, **options)
      if isinstance(tokenizer, FileTokenizer):
        chat.write_tokenizer(partial, tokenizer)
    return None
  write(out, model, params, tokenizer, loaded.step, run=run, metrics=rows)
  return exports.read_manifest(local(out))


def _export_adapter(run: config.Train, out: str | Path, step: int | None) -> None:
  rank = run.optimizer.lora_rank
  if rank is None:
    raise ExportError(
      f"{run.run_dir} has no low-rank corrections, which layout 'peft' writes; train them with"
      " optimizer.lora_rank, or export the whole model by layout 'hf'."
    )
  one_device = dataclasses.replace(run, mesh=config.Mesh(data=1))
  state = loading.load_tree(one_device, make_mesh(one_device), "optimizer", step=step)[0]
  arrays = exports.flat(state["opt_state"][0])
  kernels = {name.removesuffix(f".{lora.A}") for name in arrays if name.endswith(f".{lora.A}")}
  read = lambda name, factor: np.asarray(arrays[f"{name}.{factor}"])
  factors = {name: (read(name, lora.A), read(name, lora.B)) for name in sorted(kernels)}
  scale = (run.optimizer.lora_alpha or rank) / rank
  with new_folder(out, ExportError) as partial:
    hugging_face.save_adapter(partial, factors, config.to_dict(run.model), scale=scale)


def _expanded(
  params: Any, model: config.Model, partitions: Mapping[str, Any]
) -> tuple[Any, config.Model]:
  """Parameters and settings of a model whose layers of SSE have more partitions."""
  options = dict(model.mixer_options)
  alone = isinstance(model.mixer, str) or len(model.mixer) == 1
  own = options if alone else options.get("sse", {})
  params, own = expand_partitions(params, own, **partitions)
  options = own if alone else options | {"sse": own}
  return params, dataclasses.replace(model, mixer_options=options)


def check_same_model(manifest: Manifest, model: config.Model) -> None:
  """Raises ExportError unless `model` has the same parameters and function as the export."""
  lines = [
    f"model.{name}: {theirs!r} in the exported model, {ours!r} in the config"
    for name, (theirs, ours) in model_differences(config.Model(**manifest.model), model).items()
  ]
  if lines:
    fix = "Give the exported model's settings, in the config or by --set NAME=VALUE for each line."
    raise ExportError("the config describes another model:", *(f"  {x}" for x in (*lines, fix)))


def _portable(run: config.Train | None) -> dict[str, Any]:
  if run is None:
    return {}
  values = {name: x for name, x in config.to_dict(run).items() if name not in _LOCAL}
  return values | {"data": {name: values["data"][name] for name in ("train", "validation")}}


def _last(rows: list[Row]) -> list[Row]:
  return list({(row["kind"], row.get("set")): row for row in rows}.values())
