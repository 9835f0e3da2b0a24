"""Fingerprints of token files, which detect text that has changed since it was tokenized.

A sidecar has the SHA-256 of the whole `.bin`, of `.weights` if there is one and of `.crc32`, and a
`sample` of the files: the digest of the size and of up to 64 blocks of 64 KiB of each. The sample
is compared whenever they are used, which takes milliseconds whatever their size; up to 4 MiB it is
every byte. What is read during training is compared then (`train.data.checked_array`).
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lnssm_jax.files.reading import open_regular
from train.data.errors import DataError, reading
from train.data.indexed import CHECKSUMS, WEIGHTS

BLOCKS, BYTES = 64, 1 << 16


def sample(prefix: str | Path) -> str:
  """Digest of the sizes and of evenly spaced blocks, with the first and the last, of a pair."""
  digest = hashlib.sha256()
  weights = (WEIGHTS,) if Path(f"{prefix}{WEIGHTS}").exists() else ()
  for end in (".bin", ".idx", *weights):
    path = Path(f"{prefix}{end}")
    with reading(path), open_regular(path, follow_links=True) as file:
      size = os.fstat(file.fileno()).st_size
      digest.update(f"{end} {size}\n".encode())
      last = max(size - BYTES, 0)
      count = min(BLOCKS, -(-size // BYTES))
      for start in np.linspace(0, last, count, dtype=np.int64) if count else ():
        file.seek(int(start))
        digest.update(file.read(BYTES))
  return digest.hexdigest()


def sha256_of(prefix: str | Path, end: str) -> str | None:
  """SHA-256 of a whole file of a pair, about 2 GB/s; None if there is no such file."""
  path = Path(f"{prefix}{end}")
  with reading(path):
    if not path.exists():
      return None
    with open_regular(path, follow_links=True) as file:
      return hashlib.file_digest(file, "sha256").hexdigest()


def change(prefix: str | Path, sidecar: Mapping[str, Any], *, whole: bool = False) -> str | None:
  """Describes how a pair differs from its sidecar; None if it does not.

  Sidecars of older versions have no sample: then only `whole` detects a change of equal length.
  Those without `.crc32` leave what the sample does not have to `whole`.

  Args:
    whole: read every byte of `.bin` and `.weights` too.

  Raises:
    DataError: a file cannot be read.
  """
  if "sample" in sidecar and sidecar["sample"] != sample(prefix):
    return "sampled blocks or the size of its files have changed"
  wholes = {"sha256": ".bin", "weights_sha256": WEIGHTS} if whole else {}
  for key, end in {"crc32_sha256": CHECKSUMS, **wholes}.items():
    if key in sidecar and (found := sha256_of(prefix, end)) != sidecar[key]:
      name = f"{Path(prefix).name}{end}"
      return f"the content of {name} has changed" if found else f"{name} is missing"
  return None


def check(prefix: str | Path, sidecar: Mapping[str, Any], *, whole: bool = False) -> None:
  """Raises DataError if a pair differs from its sidecar; arguments as of `change`."""
  wrong = change(prefix, sidecar, whole=whole)
  if wrong is not None:
    raise DataError(
      f"the token files {prefix} are not as they were written: {wrong}. Restore them, or create "
      "them again with `lnssm-train tokenize --force`."
    )
