"""Sidecars of token files: `<prefix>.json`, with counts, fingerprints and origin of a pair.

The counts convert a loss to bits per byte (`tokens`, `bytes`); by tokenizer, text, fields,
targets and special tokens the next run detects whether the files are up to date.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lnssm_jax.files.atomic import replace_file
from lnssm_jax.files.reading import read_json
from lnssm_jax.pretrained.special_tokens import Added
from train.data import fingerprints, sources
from train.data.errors import DataError, reading, writing
from train.data.indexed import IndexedDataset
from train.data.labels import Rows
from train.data.tokenizers import Tokenizer

_MAX_SIDECAR = 1 << 24  # bytes


def sidecar_path(prefix: str | Path) -> Path:
  """Path of the sidecar of a pair."""
  return Path(f"{prefix}.json")


def read_sidecar(prefix: str | Path) -> dict[str, Any] | None:
  """Reads the sidecar of a pair; None if there is none.

  Raises:
    DataError: the file is not a valid sidecar.
  """
  path = sidecar_path(prefix)
  if not path.exists():
    return None
  try:
    with reading(path):
      sidecar = read_json(path, _MAX_SIDECAR, follow_links=True, strict=False)
  except DataError:
    raise
  except ValueError as error:
    raise DataError(f"{path} is unusable: {error}. Delete it and prepare the data again.") from None
  counts = [sidecar.get(key) for key in ("tokens", "bytes")]
  if not all(type(count) is int and 0 < count < 2**63 for count in counts):
    raise DataError(
      f"{path} has no positive numbers 'tokens' and 'bytes'. Delete it and prepare the data again."
    )
  return sidecar


def write_sidecar(prefix: str | Path, value: dict[str, Any]) -> None:
  """Writes the sidecar of a pair, atomically."""
  path = sidecar_path(prefix)
  with writing(path):
    replace_file(path, f"{json.dumps(value, indent=2)}\n".encode())


def origin_of(
  inputs: Sequence[str], files: Sequence[sources.Input], tokenizer: Tokenizer | None, rows: Rows
) -> dict[str, Any]:
  """Entries of a sidecar that say from what it was created; `files` are those of `inputs`.

  Without a tokenizer, one that is yet to be trained.
  """
  found = {
    "tokenizer_fingerprint": tokenizer.fingerprint if tokenizer else None,
    "source": list(inputs),
    "source_fingerprint": sources.fingerprint(files),
    **rows.origin(),
  }
  if tokenizer is not None and (chat := rows.template(tokenizer)) is not None:
    found["chat_template"] = chat.fingerprint
  special = {} if rows.special_tokens == "text" else {"in_text": rows.special_tokens}
  added = getattr(tokenizer, "added", Added())  # there are tokenizers of others, without it
  if any(added):
    special |= {"before": list(added.before), "after": list(added.after)}
  if special:
    found["special_tokens"] = special
  by_bytes = tokenizer is not None and tokenizer.spec == "bytes"
  if len(rows.fields) > 1 and rows.of_loss != "assistant" and not by_bytes:
    found["completions"] = "whole"
  return found


def up_to_date(prefix: Path, origin: dict[str, Any]) -> dict[str, Any] | None:
  """Sidecar of an intact pair that was created from exactly `origin`; otherwise None."""
  try:
    sidecar = read_sidecar(prefix)
    keys = (*origin, "fields", "targets", "special_tokens", "completions")
    if sidecar is None or any(sidecar.get(key) != origin.get(key) for key in keys):
      return None
    pair = IndexedDataset(prefix)
    whole = pair.tokens.checksums is not None or "crc32_sha256" not in sidecar
    return sidecar if whole and pair.num_tokens == sidecar["tokens"] else None
  except DataError:
    return None


def intact(prefix: Path, origin: dict[str, Any]) -> dict[str, Any] | None:
  """The sidecar of a pair that is up to date; DataError if it has changed since."""
  if sidecar := up_to_date(prefix, origin):
    fingerprints.check(prefix, sidecar)
  return sidecar


def has_digests(prefix: Path, digests: Mapping[str, str]) -> bool:
  """Whether the pair at `prefix` has a sidecar for files with these digests."""
  try:
    sidecar = read_sidecar(prefix) or {}
  except DataError:
    return False
  return digests == {key: sidecar[key] for key in ("sha256", "weights_sha256") if key in sidecar}


def check_owner(prefix: str | Path, origin: dict[str, Any], spec: str) -> None:
  """Checks that the pair at `prefix`, if there is one, may be replaced by one from `origin`.

  It may if its text or its tokenizer has changed since, or if it is damaged.

  Args:
    spec: name or path of the tokenizer.

  Raises:
    DataError: it was created from other sources, fields or targets, by another tokenizer, or with
      other special tokens: by another config, whose runs need it.
  """
  try:
    sidecar = read_sidecar(prefix)
    IndexedDataset(prefix)
  except DataError:
    return
  if sidecar is None:
    return
  keys = ["source", "fields", "targets", "special_tokens"]
  if sidecar.get("tokenizer_fingerprint") != origin.get("tokenizer_fingerprint"):
    keys.insert(0, "tokenizer")
  now = origin | {"tokenizer": spec}
  for key in keys:
    if sidecar.get(key) != now.get(key):
      raise DataError(
        f"{prefix}.bin was created with {key}={sidecar.get(key)}, not {now.get(key)}: by another"
        " config, whose runs need it. Use another data.folder or another name for the set, or"
        " replace it by `lnssm-train tokenize --force`."
      )
