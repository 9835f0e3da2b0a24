"""Low-rank corrections of a published model (LoRA, Hu et al. 2021), in the layout of PEFT.

    adapter_config.json   adapter_model.safetensors

A module of theirs with weight W [out, in] has `lora_A.weight` [r, in] and `lora_B.weight` [out, r]:
W + lora_alpha / r B A, or over sqrt(r) with `use_rslora`.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lnssm_jax.files.atomic import emptied_by_errors
from lnssm_jax.files.reading import read_json
from lnssm_jax.ops.core.checks import is_number
from lnssm_jax.pretrained import safetensors
from lnssm_jax.pretrained.families import Family, layers
from lnssm_jax.pretrained.manifest import ExportError

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_MAX_JSON = 1 << 24  # bytes
# Settings that change no loaded adapter: what was chosen, where it came from, how it began.
_FREE = [
  "auto_mapping",
  "base_model_name_or_path",
  "exclude_modules",
  "inference_mode",
  "layers_pattern",
  "layers_to_transform",
  "loftq_config",
  "lora_dropout",
  "megatron_core",
  "peft_version",
  "qalora_group_size",
  "rank_pattern",
  "revision",
  "target_modules",
  "task_type",
]
_FIXED = {
  "peft_type": ("LORA",),
  "bias": ("none",),
  "init_lora_weights": (True, False, "gaussian"),
  "use_rslora": (True, False, None),
}
_MODULE = re.compile(r"[\w.]+")


class Correction(NamedTuple):
  """The change of a matrix [out, in]: scale b a."""

  a: np.ndarray  # [r, in]
  b: np.ndarray  # [out, r]
  scale: float

  def added_to(self, matrix: np.ndarray) -> np.ndarray:
    """The sum, in float32 or wider."""
    wide = np.float64 if np.float64 in (self.a.dtype, matrix.dtype) else np.float32
    return matrix.astype(wide) + self.scale * (self.b.astype(wide) @ self.a.astype(wide))


def read(folder: str | Path) -> dict[str, Correction]:
  """{name of a tensor of the base model: its correction} of an adapter's folder.

  Raises:
    ExportError: the folder has no adapter, or one with more than low-rank corrections of matrices.
  """
  folder = Path(folder)
  try:
    config = read_json(folder / CONFIG, _MAX_JSON, strict=False)
    tensors = safetensors.Tensors(folder / TENSORS)
  except (OSError, ValueError) as error:
    raise ExportError(
      f"{folder} has no adapter of PEFT: {CONFIG} and {TENSORS} cannot be read ({error})."
    ) from None
  try:
    alpha, alphas, ranks = _numbers(config)
    found = {}
    for name in tensors:
      module = name.removeprefix(_PREFIX).removesuffix(_A).removesuffix(_B)
      pair = [tensors.get(f"{_PREFIX}{module}{end}") for end in (_A, _B)]
      a, b = pair
      if a is None or b is None or a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
        raise ExportError(f"{name} is no part of a correction a [r, in], b [out, r] of a matrix.")
      if len(a) not in ranks:
        raise ExportError(f"{name} has rank {len(a)}, which is neither r nor in rank_pattern.")
      own = [x for key, x in alphas.items() if f".{module}".endswith(f".{key}")]
      size = math.sqrt(len(a)) if config.get("use_rslora") else len(a)
      found[f"{module}.weight"] = Correction(a, b, (own[0] if own else alpha) / size)
  except ExportError as error:
    raise ExportError(f"{folder}: {error}") from None
  if not found:
    raise ExportError(f"{folder / TENSORS} has no correction.")
  return found


def _numbers(config: Mapping[str, Any]) -> tuple[float, dict[str, float], list[int]]:
  """(lora_alpha, alpha_pattern, ranks) of an adapter_config.json, whose settings are checked."""
  for name, value in config.items():
    if name in _FIXED:
      known = any(value == x and type(value) is type(x) for x in _FIXED[name])
    else:
      known = name in (*_FREE, "r", "lora_alpha", "alpha_pattern") or not value
    if not known:
      raise ExportError(f"{name}={value!r:.80} of an adapter is not implemented.")
  rank: Any = config.get("r")
  alpha = config.get("lora_alpha", 8)
  alphas, ranks = (config.get(f"{name}_pattern") or {} for name in ("alpha", "rank"))
  if not all(isinstance(x, dict) and all(map(_MODULE.fullmatch, x)) for x in (alphas, ranks)):
    raise ExportError(
      f"alpha_pattern={alphas!r:.80}, rank_pattern={ranks!r:.80} of an adapter must have names of"
      " modules; other regular expressions are not implemented."
    )
  numbers, sizes = [alpha, *alphas.values()], [rank, *ranks.values()]
  are_numbers = all(is_number(x) and 0 < x < 2**48 for x in (*numbers, *sizes))
  if not are_numbers or not all(type(x) is int for x in sizes):
    raise ExportError(
      f"r={rank!r:.80}, lora_alpha={alpha!r:.80}, rank_pattern={ranks!r:.80}, alpha_pattern="
      f"{alphas!r:.80} must be a whole number, a number above 0, and such numbers by module."
    )
  return alpha, alphas, sizes


def named(
  corrections: Mapping[str, Correction], shapes: Mapping[str, Any]
) -> dict[str, Correction]:
  """The corrections by the names that the tensors of the base model have.

  A text model may be inside a model of text and images, and be adapted without it, or with it.

  Raises:
    ExportError: there is no such matrix.
  """
  found, inner = {}, "language_model."
  for name, x in corrections.items():
    names = [name, name.replace("model.", f"model.{inner}", 1), name.replace(inner, "", 1)]
    wanted = (len(x.b), x.a.shape[1])
    same = [n for n in names if tuple(shapes.get(n, ())) == wanted]
    if not same:
      raise ExportError(
        f"the adapter changes {name} of shape {wanted}, but the model has"
        f" {shapes.get(name, 'none')}; give the adapter of this model."
      )
    if same[0] in found:
      raise ExportError(f"the adapter changes {same[0]} twice, by two names; leave one of them.")
    found[same[0]] = x
  return found


def write(
  folder: Path,
  family: Family,
  settings: Mapping[str, Any],
  factors: Mapping[str, tuple[np.ndarray, np.ndarray]],
  scale: float,
) -> None:
  """Writes factors as an adapter.

  A matrix of theirs that is several of ours, each with its factors, has those next to each other:
  its rank is the sum of theirs.

  Args:
    settings: of the model, complete.
    factors: {our kernel: (a [layers, in, r], b [layers, r, out])}, float32, without the axis of
      layers outside of blocks.
    scale: of the products a b.

  Raises:
    ExportError: a kernel is no matrix of theirs.
  """
  modules: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
  for module, a, b in _by_module(family, settings, factors):
    modules.setdefault(module, []).append((a, b))
  arrays, ranks = {}, {}
  for module, pairs in modules.items():
    arrays[f"{_PREFIX}{module}{_A}"] = np.concatenate([a for a, _ in pairs])
    arrays[f"{_PREFIX}{module}{_B}"] = np.concatenate([b for _, b in pairs], 1)
    # Of all layers alike.
    ranks[re.sub(r"^.*?\.\d+\.", "", module)] = sum(len(a) for a, _ in pairs)
  rank = min(ranks.values())
  more = {name: size for name, size in ranks.items() if size != rank}
  patterns = sorted({re.sub(r"\\\.\d+\\\.", r"\\.\\d+\\.", re.escape(x)) for x in modules})
  config = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": None,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "r": rank,
    "lora_alpha": scale * rank,
    "rank_pattern": more,
    "alpha_pattern": {name: scale * size for name, size in more.items()},
    "target_modules": rf"(?:.*\.)?(?:{'|'.join(patterns)})",
    "lora_dropout": 0.0,
    "use_rslora": False,
  }
  folder.mkdir(parents=True, exist_ok=True)
  with emptied_by_errors(folder):
    safetensors.write(folder / TENSORS, arrays, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _by_module(
  family: Family, settings: Mapping[str, Any], factors: Mapping[str, Any]
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
  """(module of theirs, a [r, in], b [out, r]) of each kernel and layer."""
  shapes = {name: (*a.shape[:-1], b.shape[-1]) for name, (a, b) in factors.items()}
  for parameter in layers.parameters(family, settings, shapes):
    a, b = factors[parameter.name]
    for number, pieces in enumerate(parameter.layers):
      if not pieces:
        continue
      own = (a[number], b[number]) if parameter.stacked else (a, b)
      (piece, *others) = pieces
      # Which row of theirs each number of ours is of: of a column one, if it is a linear layer.
      index = np.arange(piece.shape[0]).reshape(-1, *[1] * (len(piece.shape) - 1))
      rows = piece.view(np.broadcast_to(index, piece.shape))
      if others or len(piece.shape) != 2 or (rows != rows[:1]).any():
        raise ExportError(
          f"{parameter.name} is no matrix of {family.name!r}, such as PEFT adapts; leave it out of"
          " optimizer.lora_names."
        )
      their_b = np.zeros((len(index), len(own[1])), own[1].dtype)
      their_b[rows[0].reshape(-1)] = own[1].T
      yield piece.theirs.removesuffix(".weight"), np.ascontiguousarray(own[0].T), their_b
