"""Published models: folders of config.json and safetensors files, in and out.

    loaded = load("mamba-130m")              # a LoadedModel: .model .generate(text) .score(text)
    save("folder", loaded.model, loaded.settings["model"], layout="hf")

`families` has the table of each kind of model. docs/pretrained.md lists them.
"""

import contextlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from lnssm_jax.files.atomic import emptied_by_errors
from lnssm_jax.mixers.common.checks import check_choice, check_dtype
from lnssm_jax.models import LanguageModel
from lnssm_jax.models.settings import complete, params_of
from lnssm_jax.ops.core.checks import is_number
from lnssm_jax.pretrained import adapters, exports, folders, placing, safetensors
from lnssm_jax.pretrained.families import FAMILIES, Family, family_of, layers, rwkv_files, table
from lnssm_jax.pretrained.loaded import LoadedModel
from lnssm_jax.pretrained.manifest import SAME_FUNCTION, ExportError
from lnssm_jax.pretrained.rwkv_tokenizer import tokenizer_of


def load(
  folder: str | Path,
  *,
  dtype: Any = None,
  param_dtype: Any = None,
  mesh: Mesh | None = None,
  max_length: int | None = None,
  adapter: str | Path | None = None,
  tokenizer: str | Path | None = None,
) -> LoadedModel:
  """Loads a published model from a local folder with config.json and safetensors files.

      loaded = lnssm_jax.pretrained.load("mamba-130m", dtype=jnp.bfloat16)
      loaded.model, loaded.settings["model"], loaded.settings["sample"], loaded.tokenizer

  Files are memory-mapped and every parameter is read onto its devices, one after another: host
  memory never has a second copy of the model. The folder is data: nothing in it is executed.

  Args:
    folder: of one file, or of several with an index; or the .pth file of RWKV-6 or 7 (World, G1).
      It is read without torch, and without running what its pickle says.
    dtype: of activations and matrix products; None takes that of the embedding in the file, but
      float32 for float16.
    param_dtype: of the parameters; None leaves each as it is stored.
    mesh: shards the parameters over a mesh by the rules of `lnssm_jax.sharding`; None takes the
      first device of this process.
    max_length: tokens that the caches of attention layers hold, in place of the config's maximum.
    adapter: a folder of PEFT with low-rank corrections (LoRA), which are added to the weights:
      in float32 or wider, rounded to the dtype of the parameters.
    tokenizer: the path of a tokenizer.json, or of the vocabulary of RWKV World (a `.txt`), in place
      of that of the folder.

  Returns:
    A `LoadedModel`. Its settings["sample"] has what generation_config.json says, and its tokenizer
    is the folder's tokenizer.json.

  Raises:
    ExportError: the folder has no such model, a setting in config.json is unknown or not
      implemented, contradicts another or has no bound that makes sense, or a tensor is missing, has
      another shape, is not used or not finite; the message names it.
    DataError: the file of `tokenizer` is missing or unusable.
    ValueError: a dtype is not one of floating point.
  """
  folder = Path(folder)
  check_dtype("dtype", dtype)
  check_dtype("param_dtype", param_dtype)
  own = None if tokenizer is None else tokenizer_of(tokenizer)
  if folder.is_file():  # RWKV as its author publishes it
    tensors, sample = folders.Tensors(folder), {}
    family, config = _of_file(folder, tensors)
    settings = family.settings(config)
  else:
    config, tensors = folders.config(folder), folders.Tensors(folder)
    sample = folders.sample(folder, config)  # before the parameters, which take time
    family, settings = _of_config(folder, config, max_length)
  if sample.get("top_k", 0) > settings["vocab_size"]:  # of all, as in transformers
    del sample["top_k"]
  try:
    tensors.rename(family.older_tensors)
    family = family.as_stored(tensors.shapes)
    _check_sizes(family, settings, tensors.shapes)
    _check_dtypes(tensors.dtypes, param_dtype)
    if adapter is not None:
      corrections = adapters.named(adapters.read(adapter), tensors.shapes)
      tensors.corrections = {name: x.added_to for name, x in corrections.items()}
    stored = tensors.dtypes[_embedding(family)]
    settings["dtype"] = str(jnp.dtype(dtype or {"float16": "float32"}.get(stored, stored)))
    settings["param_dtype"] = str(jnp.dtype(param_dtype or stored))
    graph, abstract = exports.abstract_model(settings)
    shapes = {name: leaf.shape for name, leaf in exports.flat(abstract).items()}
    found = list(layers.parameters(family, settings, shapes))
    layers.check_covered(found, _without_skipped(family, settings, tensors))
  except ExportError as error:
    raise ExportError(f"{folder}: {error}") from None
  by_name = {parameter.name: parameter for parameter in found}
  with placing.threads() as pool:
    read = lambda path, _, where: placing.read(
      by_name[exports.name_of(path)], tensors, param_dtype, where, pool
    )
    where = placing.shardings(abstract, mesh)
    params = jax.tree_util.tree_map_with_path(read, abstract, where)
  model = nnx.merge(graph, params)
  return LoadedModel(
    model,
    {"model": settings, "sample": sample},
    0,
    folder,
    list,
    lambda: own or folders.tokenizer(folder, config),
  )


def settings_of(folder: str | Path, *, max_length: int | None = None) -> dict[str, Any]:
  """The settings of the `LanguageModel` of a published folder, without dtypes.

  Arguments and errors are those of `load`.
  """
  folder = Path(folder)
  if folder.is_file():
    family, config = _of_file(folder, folders.Tensors(folder))
    return family.settings(config)
  return _of_config(folder, folders.config(folder), max_length)[1]


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
  """The settings by which two models have different functions, as lines "path: a, b"."""
  a, b = _complete(one), _complete(other)
  return [
    f"{path}: {a.get(path)!r}, {b.get(path)!r}"
    for path in sorted(a.keys() | b.keys())
    if a.get(path) != b.get(path)
  ]


def save(
  folder: str | Path,
  model: LanguageModel | Mapping[str, Any],
  settings: Mapping[str, Any],
  *,
  layout: str,
  model_type: str | None = None,
  end_of_text: int | None = None,
) -> None:
  """Writes a model as a folder that another project opens, with the same function.

  Args:
    folder: a new one, or an empty one.
    model: the model, or its parameters as a nested dictionary.
    settings: of the model, as `LoadedModel.settings["model"]`.
    layout: "hf" for transformers, "fla" for flash-linear-attention, "mamba_ssm" for mamba-ssm.
    model_type: the family, where several have the function of the model, such as "qwen3_5_text"
      and "qwen3_next"; None means the first that has it.
    end_of_text: the id of the token that ends a text (eos_token_id), if there is one.

  Raises:
    ExportError: no family of that layout can represent the model, or the folder is not empty; the
      message says which settings differ.
  """
  if "mixer" not in settings:
    raise ExportError(
      f"settings has {', '.join(sorted(settings)[:6])}, but no mixer; give those of the model:"
      " loaded.settings['model']."
    )
  folder = Path(folder)
  family, config = _family_for(settings, layout, model_type)
  params = params_of(model) if isinstance(model, nnx.Module) else model
  arrays = {name: np.asarray(x) for name, x in exports.flat(params).items()}
  shapes = {name: x.shape for name, x in arrays.items()}
  theirs: dict[str, np.ndarray] = {}
  for parameter in layers.parameters(family, _explicit(settings), shapes):
    ours = arrays[parameter.name]
    for number, pieces in enumerate(parameter.layers):
      array = ours[number] if parameter.stacked else ours
      for piece in pieces:
        tensor = theirs.setdefault(piece.theirs, np.empty(piece.shape, ours.dtype))
        piece.view(tensor)[...] = array if piece.part is None else piece.part(array)
  config["torch_dtype"] = str(theirs[_embedding(family)].dtype)
  config |= {} if end_of_text is None else {"eos_token_id": end_of_text}
  folder.mkdir(parents=True, exist_ok=True)
  if any(folder.iterdir()):
    raise ExportError(f"{folder} exists and is not empty; give another folder.")
  with emptied_by_errors(folder):
    safetensors.write(folder / folders.TENSORS, theirs, {"format": "pt"})
    (folder / folders.CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def save_adapter(
  folder: str | Path,
  factors: Mapping[str, tuple[np.ndarray, np.ndarray]],
  settings: Mapping[str, Any],
  *,
  scale: float,
  model_type: str | None = None,
) -> None:
  """Writes low-rank corrections (LoRA) of a model of transformers or fla as a folder of PEFT.

  Args:
    folder: a new one, or an empty one.
    factors: {kernel, such as "blocks.mixer.q_proj.kernel": (a [L, in, r], b [L, r, out])}.
    settings, model_type: of the model, as in `save`.
    scale: of the products a b.

  Raises:
    ExportError: neither has such a model, a kernel is no matrix there, the factors or their
      scale are not those of the model, or the folder is not empty.
  """
  folder = Path(folder)
  if folder.is_dir() and any(folder.iterdir()):
    raise ExportError(f"{folder} exists and is not empty; give another folder.")
  if not is_number(scale) or not 0 < scale < math.inf:
    raise ExportError(f"scale={scale!r:.80} must be a number above 0: lora_alpha / rank.")
  if not factors:
    raise ExportError("factors has no kernel; give {name: (a, b)}, as optimizer.lora_rank trains.")
  kernels = exports.flat(exports.abstract_params(settings))
  for name, pair in factors.items():
    found = [np.shape(x) for x in pair] if isinstance(pair, tuple | list) else []
    *lead, rows, columns = kernels[name].shape if name in kernels else (0, 0)
    rank = found[0][-1] if found and found[0] else 0
    if name in kernels and found != [(*lead, rows, rank), (*lead, rank, columns)]:
      raise ExportError(
        f"the factors of {name} have the shapes {found}, but its matrix has"
        f" {(*lead, rows, columns)}; give a [..., in, r] and b [..., r, out]."
      )
  family = _adapted(settings, model_type)
  adapters.write(folder, family, _explicit(settings), factors, scale)


def check_adapter(settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
  """Raises the ExportError of `save_adapter` for factors of kernels of these shapes."""
  adapters.check(_adapted(settings, None), _explicit(settings), shapes)


def _adapted(settings: Mapping[str, Any], model_type: str | None) -> Family:
  """The family whose modules PEFT adapts: of transformers, or else of fla."""
  layout = next((x for x in ("hf", "fla") if x in exportable(settings)), "hf")
  return _family_for(settings, layout, model_type)[0]


def exportable(settings: Mapping[str, Any]) -> dict[str, str]:
  """{layout: model_type} of the families that have the function of a model with these settings."""
  found = {}
  for layout in dict.fromkeys(family.layout for family in FAMILIES):
    with contextlib.suppress(ExportError):
      found[layout] = _family_for(settings, layout, None)[0].name
  return found


def _family_for(
  settings: Mapping[str, Any], layout: str, model_type: str | None
) -> tuple[Family, dict[str, Any]]:
  """The family that represents a model, and its config.json."""
  candidates = [family for family in FAMILIES if family.layout == layout]
  if not candidates:
    layouts = sorted({family.layout for family in FAMILIES})
    raise ExportError(f"layout={layout!r} is unknown; the layouts are {', '.join(layouts)}.")
  if model_type is not None:
    check_choice("model_type", model_type, [family.name for family in candidates])
    candidates = [family for family in candidates if family.name == model_type]
  best = None
  for family in candidates:
    mixer = family.constants.get("mixer")  # None: a pattern
    if mixer != settings["mixer"] and (mixer or isinstance(settings["mixer"], str)):
      continue
    rows = {name.split(".")[1] for name in family.rows if name.startswith("blocks.")}
    if mixer is None and "mixer" not in rows and {*settings["mixer"]} - rows - {"none"}:
      continue  # a pattern of others, of which the first error says nothing
    explicit = _explicit(settings)
    try:
      config = family.config(explicit)
      lines = differences(settings, family.settings(config))
      if not lines:
        return family, config
    except ExportError as error:
      fixed = ((path, table.get(explicit, path, None), x) for path, x in family.constants.items())
      lines = [f"{path}: {ours!r}, {theirs!r}" for path, ours, theirs in fixed if ours != theirs]
      lines = lines or [str(error).rstrip(".")]
    except (ValueError, TypeError, LookupError):  # of another pattern of mixers
      continue
    best = lines if best is None or len(lines) < len(best) else best
  reason = f"here and there: {'; '.join(best[:4])}" if best else "no family has this mixer"
  raise ExportError(
    f"no model of layout {layout!r} has the function of this one, whose mixer is "
    f"{settings['mixer']!r}; {reason}. lnssm_jax.save_model, and `export` without --layout,"
    " save any."
  )


def _explicit(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Settings with their defaults written out, options of a pattern by the mixer's name."""
  values, mixer = complete(settings), settings["mixer"]
  by_place = values["mixer_options"]
  if isinstance(mixer, str):
    options = by_place["0"]
  else:
    options = {name: by_place[str(place)] for place, name in enumerate(mixer)}
  return values | {"mixer": mixer, "mixer_options": options}


_ASIDE = (*SAME_FUNCTION, "param_dtype", "sequence_axis")
_OF_TRAINING = ("channel_mixer_options.balance", "channel_mixer_options.moe.balance")


def _complete(settings: Mapping[str, Any]) -> dict[str, Any]:
  """{path of a setting: value}, with the defaults of the model, its mixers and channel mixer."""
  return {
    path: value
    for path, value in _leaves(complete(settings))
    if path.split(".")[0] not in _ASIDE and path not in _OF_TRAINING
  }


def _of_config(folder: Path, config, max_length) -> tuple[Family, dict[str, Any]]:
  try:
    family = family_of(config)
    settings = family.settings(config)
    if max_length is not None:
      if (longest := family.longest(config)) is not None and max_length > longest:
        raise ExportError(
          f"max_length={max_length} is more than {longest}, from which on the positions of"
          " attention are other ones (dual_chunk_attention_config), which are not implemented."
        )
      _set_max_length(settings, max_length)
    return family, settings
  except ExportError as error:
    raise ExportError(f"{folder / folders.CONFIG}: {error}") from None


def _of_file(path: Path, tensors: folders.Tensors) -> tuple[Family, dict[str, Any]]:
  try:
    return rwkv_files.of_tensors(tensors.shapes)
  except ExportError as error:
    raise ExportError(f"{path}: {error}") from None


def _check_sizes(family: Family, settings, shapes: Mapping[str, tuple[int, ...]]) -> None:
  """Bounds what building the model costs by what the files have."""
  name, wanted = _embedding(family), (settings["vocab_size"], settings["dim"])
  if shapes.get(name) != wanted:
    raise ExportError(
      f"{name} has shape {shapes.get(name)}, but config.json says vocab_size={wanted[0]} and a "
      f"width of {wanted[1]}; the two do not belong together."
    )
  if not 1 <= settings["num_layers"] <= len(shapes):
    raise ExportError(
      f"config.json says {settings['num_layers']} layers, but there are {len(shapes)} tensors."
    )
  total = sum(map(math.prod, shapes.values()))
  for path, value in _leaves(settings):
    if path.endswith(("length", "window")):  # how much is remembered, whatever the parameters
      if isinstance(value, int | float) and value > folders.MOST_TOKENS:
        raise ExportError(
          f"{path}={value} is more than {folders.MOST_TOKENS:,} tokens, the most of one sequence; "
          "correct config.json, or give max_length if it is that of a cache."
        )
    elif type(value) is int and value > total:
      raise ExportError(f"{path}={value} is more than the tensors have elements.")


def _check_dtypes(dtypes: Mapping[str, str], param_dtype: Any) -> None:
  for name, dtype in dtypes.items():
    if dtype not in ("float16", "bfloat16", "float32", "float64"):
      raise ExportError(f"{name} has dtype {dtype}; quantized models are not implemented.")
    if dtype == "float64" and param_dtype is None and not jax.config.jax_enable_x64:
      raise ExportError(
        f"{name} has dtype float64, which JAX has with jax_enable_x64 only; or give param_dtype."
      )


def _leaves(settings, prefix=""):
  for name, value in settings.items():
    if isinstance(value, dict):
      yield from _leaves(value, f"{prefix}{name}.")
    else:
      yield prefix + name, value


def _embedding(family: Family) -> str:
  return _one(family, "embedding")


def _one(family: Family, name: str) -> str:
  """The tensor of a parameter that is one."""
  row = family.rows[name]
  assert not isinstance(row, list)
  return row.theirs


def _without_skipped(family: Family, settings, tensors: folders.Tensors):
  """Shapes of the tensors that the model has; a tied head may be stored twice."""
  further = "|".join(str(settings["num_layers"] + n) for n in range(8))
  skipped = family.skipped.replace("FURTHER", further)
  shapes = {n: s for n, s in tensors.shapes.items() if not re.fullmatch(skipped, n)}
  head, embedding = _one(family, "head.kernel"), _embedding(family)
  if settings["tie_embeddings"] and head in shapes:
    if not np.array_equal(tensors[head], tensors[embedding]):
      raise ExportError(f"{head} differs from {embedding}, but config.json says they are tied.")
    del shapes[head]
  return shapes


def _set_max_length(settings: dict[str, Any], max_length: int) -> None:
  options = settings["mixer_options"]
  holders = [o for o in (options, *options.values()) if isinstance(o, dict) and "max_length" in o]
  if not holders:
    raise ExportError(f"max_length={max_length}: this model has no cache of bounded length.")
  for holder in holders:
    holder["max_length"] = max_length
