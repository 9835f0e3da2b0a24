"""Binding of checkpoints to the model of their run, its text and its tokenizer.

The metadata of a checkpoint has the settings of the run, and fingerprints of what it reads; its
digests cover them. Checkpoints of older versions have fewer, and what is missing is not compared.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lnssm_jax.files.buckets import local
from lnssm_jax.files.printable import PrintableError
from train import config
from train.config.changes import flatten, is_free, model_differences
from train.data import fingerprints
from train.data.errors import DataError
from train.data.tokenizers import Tokenizer, tokenizer_of, tokenizer_path


class BindingError(PrintableError, ValueError):
  """A run would continue, or be read, with another model, text or tokenizer than its own."""


def inputs(data: config.Data, sidecars: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any]:
  """Fingerprints of the tokenizer and of every set, as this process reads them.

  Returns:
    {"tokenizer": fingerprint, "data": {set: {"sha256": of its .bin, by the sidecar, or None;
    "sample": of its files; "weights_sha256": of its .weights, if the sidecar has one}}}.
  """
  found = {
    name: {
      "sha256": (sidecar or {}).get("sha256"),
      "sample": fingerprints.sample(local(data.folder) / name),
      **{key: value for key, value in (sidecar or {}).items() if key == "weights_sha256"},
    }
    for name, sidecar in sidecars.items()
  }
  tokenizer = tokenizer_of(data)
  return {"tokenizer": tokenizer.fingerprint, "data": found}


def changed_sets(before: Mapping[str, Any], now: Mapping[str, Mapping[str, Any]]) -> list[str]:
  """Names of the sets whose text differs between two results of `inputs`.

  Older versions stored only the SHA-256 of a training set, or None.
  """

  def same(old: Any, new: Mapping[str, Any]) -> bool:
    if not isinstance(old, dict):
      return old == new["sha256"]
    pairs = ((old.get(key), new.get(key)) for key in ("sha256", "weights_sha256"))
    whole = all(None in pair or pair[0] == pair[1] for pair in pairs)
    return old.get("sample") == new["sample"] and whole

  return [name for name in before if name in now and not same(before[name], now[name])]


def check_in_use(data: Mapping[str, Mapping[str, Any]], folder: str | Path) -> None:
  """Raises BindingError if the token files of a run have changed since `inputs` returned `data`.

  Pairs of other programs have no checksums: what is written into them during training is trained
  on. Files that cannot be read now are left to the next start.
  """
  changed = []
  for name, before in data.items():
    with contextlib.suppress(DataError):
      if fingerprints.sample(Path(folder) / name) != before["sample"]:
        changed.append(name)
  if changed:
    raise BindingError(
      f"the text of {', '.join(changed)} in {folder} has changed during training; nothing trained "
      "on it is saved. Restore it, and resume from the last checkpoint."
    )


def check_model(metadata: Mapping[str, Any], model: config.Model, place: str | Path) -> None:
  """Raises BindingError unless `model` computes the function of the checkpoint with `metadata`.

  Other settings may have the same parameters, such as another number of heads.
  """
  stored = metadata.get("config")
  if stored is None:
    return
  lines = [
    f"model.{name}: trained with {before!r}, these settings have {now!r}"
    for name, (before, now) in model_differences(config.Model(**stored["model"]), model).items()
  ]
  if lines:
    raise BindingError(
      f"the checkpoint in {place} is of another model:",
      *(f"  {line}" for line in lines),
      "Restore these settings (config.json of the run folder may have been changed).",
    )


def changed_settings(metadata: Mapping[str, Any], cfg: Any) -> list[str]:
  """Settings in which a config differs from that of the checkpoint with `metadata`, as lines.

  Without those that a run may change at any time, those that this version has added, and where its
  folder is.
  """
  before, now = (
    dict(flatten(values)) for values in (metadata.get("config") or {}, config.to_dict(cfg))
  )
  return [
    f"{name}={now[name]!r}, saved with {before[name]!r}"
    for name in sorted(before.keys() & now.keys())
    if before[name] != now[name] and name != "run_dir" and not is_free(name)
  ]


def check_tokenizer(metadata: Mapping[str, Any], data: config.Data, fingerprint: str) -> None:
  """Raises BindingError unless the checkpoint with `metadata` has seen tokens of `fingerprint`.

  `fingerprint` is that of the tokenizer of `data`.
  """
  if metadata.get("tokenizer") not in (None, fingerprint):
    path = tokenizer_path(data.tokenizer, local(data.folder))
    named = f"data.tokenizer={data.tokenizer!r}{f' ({path})' if path else ''}"
    raise BindingError(
      f"{named} is not the tokenizer of this run: it has changed since, and its tokens mean other"
      " text. Restore the file, or use another run_dir; a run of an older version, whose texts had"
      " no BOS of the file, needs data.add_special_tokens='none'."
    )


def checked_tokenizer(metadata: Mapping[str, Any], data: config.Data) -> Tokenizer:
  """Loads the tokenizer of `data`.

  Raises:
    BindingError: as `check_tokenizer`.
    DataError: it is missing or unusable.
  """
  tokenizer = tokenizer_of(data)
  check_tokenizer(metadata, data, tokenizer.fingerprint)
  return tokenizer


def check_before_preparing(metadata: Mapping[str, Any], data: config.Data) -> None:
  """Raises BindingError as `checked_tokenizer`, before `prepare` tokenizes with the wrong one."""
  with contextlib.suppress(DataError):  # missing: `prepare` trains it, or says so
    checked_tokenizer(metadata, data)
