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
from lnssm_jax.pretrained import folders, safetensors
from lnssm_jax.pretrained.families import Family, layers
from lnssm_jax.pretrained.manifest import ExportError

CONFIG, TENSORS = folders.ADAPTER, "adapter_model.safetensors"
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


def check(family: Family, settings: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
  """Raises ExportError unless `write` can write factors of kernels of these shapes."""
  empty = lambda *shape: np.zeros(shape, np.float32)
  factors = {name: (empty(*s[:-1], 0), empty(*s[:-2], 0, s[-1])) for name, s in shapes.items()}
  for _ in _by_module(family, settings, factors):
    pass


def _by_module(
  family: Family, settings: Mapping[str, Any], factors: Mapping[str, Any]
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
  """(module of theirs, a [r, in], b [out, r]) of each kernel and layer."""
  shapes = {name: (*a.shape[:-1], b.shape[-1]) for name, (a, b) in factors.items()}
  for parameter in layers.parameters(family, settings, shapes):
    a, b = factors[parameter.name]
    for number, pieces in enumerate(parameter.layers):
      own_a, own_b = (a[number], b[number]) if parameter.stacked else (a, b)
      found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
      for piece in pieces:
        places = _places(piece, (len(own_a), own_b.shape[-1])) if own_a.ndim == 2 else None
        if places is None or not piece.theirs.endswith(".weight"):
          raise ExportError(
            f"{parameter.name} is no matrix of {family.name!r}, such as PEFT adapts; leave it out"
            " of optimizer.lora_names."
          )
        their_b = np.zeros((piece.shape[0], own_b.shape[0]), own_b.dtype)
        _, their_b = found.setdefault(piece.theirs, (own_a, their_b))
        theirs, ours = places
        their_b[theirs] = own_b.T[ours]
      for theirs, (own_a, their_b) in found.items():
        yield theirs.removesuffix(".weight"), np.ascontiguousarray(own_a.T), their_b


def _places(piece: layers.Piece, ours: tuple[int, int]) -> tuple[np.ndarray, np.ndarray] | None:
  """(rows of their matrix [out, in], columns of ours [in, out]) that are the same numbers.

  None if a piece is anything else, such as one matrix of several, or in another order of `in`.
  """
  if len(piece.shape) != 2 or piece.shape[1] != ours[0]:
    return None
  of_ours = piece.part or (lambda x: x)
  index = lambda n: np.arange(n, dtype=np.int32)
  rows, columns = (
    piece.view(np.broadcast_to(index(piece.shape[0])[:, None], piece.shape)),
    of_ours(np.broadcast_to(index(ours[1]), ours)),
  )
  their_in, our_in = (
    piece.view(np.broadcast_to(index(ours[0]), piece.shape)),
    of_ours(np.broadcast_to(index(ours[0])[:, None], ours)),
  )
  rows, columns, their_in, our_in = (
    x.reshape(len(x), -1) for x in (rows, columns, their_in, our_in)
  )
  in_order = index(ours[0])[:, None]
  once = lambda x: x[tuple(slice(1 if step == 0 else None) for step in x.strides)]  # each number
  same = lambda x, y: x.shape[:1] == ours[:1] and (once(x) == y).all()
  if not (same(rows, rows[:1]) and same(columns, columns[:1])):
    return None
  return (rows[0], columns[0]) if same(their_in, in_order) and same(our_in, in_order) else None
