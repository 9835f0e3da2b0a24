"""Checked reading of a published model's folder: config, tensors, generation settings, tokenizer.

    config.json   model.safetensors, or its shards with model.safetensors.index.json
    generation_config.json, tokenizer.json where they exist

A folder is data from elsewhere: no file outside it is opened, none is executed, and no memory is
taken before sizes have been compared.
"""

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lnssm_jax.files.reading import read_json
from lnssm_jax.pretrained import safetensors, torch_files
from lnssm_jax.pretrained import special_tokens as special
from lnssm_jax.pretrained.manifest import ExportError
from lnssm_jax.pretrained.tokenizers import FileTokenizer

CONFIG, TENSORS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
INDEX, GENERATION = "model.safetensors.index.json", "generation_config.json"
ADAPTER = "adapter_config.json"  # of PEFT
_MAX_JSON = 1 << 26  # bytes
_MAX_SHARDS = 10_000
MOST_TOKENS = 1 << 24  # of one sequence; a cache of attention has room for all of them
_PICKLES = (".bin", ".pth", ".pt", ".ckpt")
_CONVERT = (
  "import torch; from safetensors.torch import save_file; save_file({name: x.clone() for name, x "
  'in torch.load(%s, weights_only=True).items()}, "model.safetensors")'
)


def is_published(folder: str | Path) -> bool:
  """Whether a folder, or a file of torch, looks like a published model."""
  folder = Path(folder)
  if folder.suffix == ".pth" and folder.is_file():
    return True
  names = [TENSORS, INDEX]
  has_tensors = any((folder / name).is_file() for name in names) or bool(_pickles(folder))
  return (folder / CONFIG).is_file() and has_tensors


def config(folder: Path) -> dict[str, Any]:
  """Reads config.json."""
  if not folder.is_dir():
    raise ExportError(f"there is no folder {folder}; give one with {CONFIG} and {TENSORS}.")
  return plain(_json(folder / CONFIG))


class Tensors(Mapping[str, np.ndarray]):
  """The tensors of a folder, or of a file of torch, by name, memory-mapped.

  Raises:
    ExportError: there are none, they are pickles, a file is damaged, is a link, or the index does
      not describe the files.
  """

  def __init__(self, folder: Path):
    alone = folder.is_file()  # of torch
    files = {"": None} if alone else self._files(folder)
    self._homes: dict[str, safetensors.Tensors | torch_files.Tensors] = {}
    self._stored: dict[str, str] = {}  # {name: the one in the file}, where it was renamed
    # {name: a function that corrects it}
    self.corrections: dict[str, Callable[[np.ndarray], np.ndarray]] = {}
    for name, wanted in files.items():
      path = folder / name
      try:
        opened = torch_files.Tensors(path) if alone else safetensors.Tensors(path)
      except (OSError, ValueError) as error:
        raise ExportError(f"{path} cannot be read ({error}).") from None
      if wanted is not None and wanted != set(opened):
        differing = sorted(wanted.symmetric_difference(opened))[0]
        raise ExportError(f"{folder / INDEX} and {name} disagree about the tensor {differing}.")
      for tensor in opened:
        if tensor in self._homes:
          raise ExportError(f"{tensor} is in two files of {folder}.")
        self._homes[tensor] = opened
    kinds = {name: home.kind(name) for name, home in self._homes.items()}
    self.dtypes = {name: dtype for name, (dtype, _) in kinds.items()}
    self.shapes = {name: shape for name, (_, shape) in kinds.items()}

  def rename(self, names: Mapping[str, str]) -> None:
    """Gives tensors whose names have a part in `names` the name with the other part.

    Raises:
      ExportError: a tensor of that name is there too.
    """
    for name in list(self._homes):
      new = name
      for old, today in names.items():
        new = new.replace(old, today)
      if new != name:
        if new in self._homes:
          raise ExportError(f"{name} and {new} are two names of one tensor; remove one.")
        self._homes[new], self._stored[new] = self._homes.pop(name), name
        self.dtypes[new], self.shapes[new] = self.dtypes.pop(name), self.shapes.pop(name)

  def __getitem__(self, name: str) -> np.ndarray:
    found = self._homes[name].mapped(self._stored.get(name, name))
    return self.corrections[name](found) if name in self.corrections else found

  def __iter__(self) -> Iterator[str]:
    return iter(self._homes)

  def __len__(self) -> int:
    return len(self._homes)

  @staticmethod
  def _files(folder: Path) -> dict[str, set[str] | None]:
    """{file: its tensors by the index, or None}: the one file before an index, as transformers."""
    if (folder / TENSORS).exists():
      return {TENSORS: None}
    if not (folder / INDEX).exists():
      if pickles := _pickles(folder):
        # The name is data from elsewhere: quoted for Python, and the program for the shell.
        program = shlex.quote(_CONVERT % json.dumps(pickles[0]))
        raise ExportError(
          f"{folder / pickles[0]} is a pickle, which can run any program when it is read; where "
          f"its source is trusted, convert it in its folder: python -c {program}"
        )
      raise ExportError(f"{folder} has no {TENSORS} and no {INDEX}.")
    index = _json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(x, str) for x in index.values()):
      raise ExportError(f"{folder / INDEX} has no weight_map of names.")
    files: dict[str, set[str] | None] = {}
    for tensor, name in index.items():
      if not re.fullmatch(r"[\w-]+(\.[\w-]+)*\.safetensors", name):
        raise ExportError(f"{folder / INDEX}: {name!r:.80} is no file of this folder.")
      held = files.setdefault(name, set())
      assert held is not None
      held.add(tensor)
    if len(files) > _MAX_SHARDS:
      raise ExportError(f"{folder / INDEX} names {len(files):,} files.")
    return files


def sample(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
  """Settings of `LoadedModel.generate`, of generation_config.json: those that it has.

  Tokens that end a text are its own, or else those of config.json (in transformers a text ends at
  none, if the file is there without them). Without the file also the tokenizer's `eos_token` is
  one: it ends the replies of a model for chats, whose config.json names what ends a document.
  """
  ends = ends_of(folder / CONFIG, config)
  if not os.path.lexists(folder / GENERATION):  # a link to nothing is an error
    return _stops((*ends, *(x for x in _end_of_replies(folder) if x not in ends)))
  values = plain(_json(folder / GENERATION))
  found: dict[str, Any] = _stops(ends_of(folder / GENERATION, values) or ends)
  if values.get("do_sample") is True:
    values = _DRAWN | {x: v for x, v in values.items() if v is not None or x == "top_k"}
  for theirs, (ours, kinds) in _GENERATION.items():
    value = values.get(theirs)
    if value is None:
      continue
    if type(value) not in kinds or not 0 <= value <= MOST_TOKENS:
      raise ExportError(
        f"{folder / GENERATION}: {theirs}={value!r:.80} is no number for it, which is one of 0 to "
        f"{MOST_TOKENS:,}."
      )
    found[ours] = value
  if found.get("top_k") == 0:  # no limit, there
    del found["top_k"]
  if values.get("do_sample") is not True:  # the default of transformers, whatever the temperature
    found["temperature"] = 0
  return found


# Of transformers where the file has none; a `top_k` of null is no limit.
_DRAWN = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
_GENERATION = {
  "max_new_tokens": ("tokens", (int,)),
  "temperature": ("temperature", (int, float)),
  "top_k": ("top_k", (int,)),
  "top_p": ("top_p", (int, float)),
  "min_p": ("min_p", (int, float)),
  "repetition_penalty": ("repetition_penalty", (int, float)),
}


def tokenizer(folder: Path, config: Mapping[str, Any]) -> FileTokenizer:
  """The folder's tokenizer.json, with what tokenizer_config.json puts around a text.

  A text ends with config.json's first eos_token_id.

  Raises:
    DataError: it is missing, a link, or unusable, or the package `tokenizers` is not installed.
    ExportError: eos_token_id is no token.
  """
  end = next(iter(ends_of(folder / CONFIG, config)), None)
  return FileTokenizer(folder / TOKENIZER, follow_links=False, end_of_text=end)


def ends_of(path: Path, values: Mapping[str, Any]) -> tuple[int, ...]:
  """eos_token_id of a file: one token, several, or none."""
  text = values.get("text_config")  # of a model of text and images
  given = (text | values if isinstance(text, dict) else values).get("eos_token_id")
  ends = given if isinstance(given, list) else [] if given is None else [given]
  if any(type(end) is not int or not 0 <= end < MOST_TOKENS for end in ends):
    raise ExportError(f"{path}: eos_token_id={given!r:.80} is no token, or no list of them.")
  return tuple(ends)


def _end_of_replies(folder: Path) -> tuple[int, ...]:
  """`eos_token` of tokenizer_config.json, if tokenizer.json has it."""
  try:
    token = special.token_of(special.read_settings(folder, follow_links=False), "eos_token")
    found = [] if token is None else read_json(folder / TOKENIZER, _MAX_JSON)["added_tokens"]
    return tuple(x["id"] for x in found if x["content"] == token and type(x["id"]) is int)
  except (OSError, ValueError, LookupError, TypeError):  # where a tokenizer is used, it says so
    return ()


def _stops(ends: tuple[int, ...]) -> dict[str, Any]:
  return {"stop_tokens": ends} if ends else {}


def _pickles(folder: Path) -> list[str]:
  return sorted(path.name for path in folder.glob("*") if path.suffix in _PICKLES)


def _json(path: Path) -> dict[str, Any]:
  try:
    return read_json(path, _MAX_JSON, strict=False)  # transformers writes Infinity
  except FileNotFoundError:
    adapter = "; it is an adapter: load its model with adapter=" * (path.parent / ADAPTER).exists()
    raise ExportError(f"{path.parent} has no {path.name}{adapter}.") from None
  except (OSError, ValueError) as error:
    raise ExportError(f"{path} cannot be read ({error}).") from None


def plain(value: Any) -> Any:
  """JSON values as transformers 5 writes them: {"__float__": "Infinity"} is a number."""
  if isinstance(value, dict):
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
      return float(value["__float__"])
    return {name: plain(x) for name, x in value.items()}
  return [plain(x) for x in value] if isinstance(value, list) else value
