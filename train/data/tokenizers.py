"""Tokenizers by the name in a config: "bytes", "bpe:N" trained here, or a `tokenizer.json`."""

import os
from collections.abc import Iterable
from pathlib import Path

import tokenizers

from lnssm_jax.pretrained.tokenizers import (
  END_OF_TEXT,
  ByteTokenizer,
  FileTokenizer,
  Tokenizer,
  split,
)
from train.checkpoint.safe_files import replace_file
from train.data.errors import DataError, writing

LEAST_BPE = 257  # 256 bytes and the end of text


def load_tokenizer(spec: str, folder: str | Path | None = None) -> Tokenizer:
  """Loads the tokenizer named by `data.tokenizer`.

  Args:
    spec: "bytes"; "bpe:N", which `prepare` trained and saved in `folder`; or the path of a
      tokenizer.json, in which `~` and environment variables are expanded.
    folder: `data.folder`; only "bpe:N" needs it.

  Raises:
    DataError: the file is missing or unusable, or does not have N entries.
  """
  if spec == "bytes":
    return ByteTokenizer()
  if not spec.startswith("bpe:"):
    return _load_file(spec)
  size = bpe_size(spec)
  if folder is None:
    raise DataError(f"the tokenizer {spec!r} is stored in the folder of its data; set data.folder.")
  path = bpe_path(folder)
  if not path.is_file():
    raise DataError(
      f"{path} does not exist: {spec!r} is trained when the data is prepared. Run"
      " `python -m train tokenize --config FILE`."
    )
  tokenizer = FileTokenizer(path, spec)
  if tokenizer.vocab_size != size:
    raise DataError(
      f"{path} has {tokenizer.vocab_size} entries, but data.tokenizer={spec!r} needs {size}; set"
      f" data.tokenizer='bpe:{tokenizer.vocab_size}', or prepare the data in another data.folder."
    )
  return tokenizer


def bpe_size(spec: str) -> int:
  """Returns N of "bpe:N"."""
  number = spec.removeprefix("bpe:")
  if not (number.isascii() and number.isdecimal()) or int(number) < LEAST_BPE:
    raise DataError(
      f"the tokenizer {spec!r} needs a whole number of entries of at least {LEAST_BPE}, as in"
      " 'bpe:4096'."
    )
  return int(number)


def bpe_path(folder: str | Path) -> Path:
  """Path of the BPE of a data folder."""
  return Path(folder) / "tokenizer.json"


def tokenizer_path(spec: str, folder: str | Path) -> Path | None:
  """Path of the file of `data.tokenizer`; None for "bytes"."""
  if spec == "bytes":
    return None
  if spec.startswith("bpe:"):
    return bpe_path(folder)
  return Path(os.path.expanduser(os.path.expandvars(spec)))


def train_bpe(spec: str, folder: str | Path, texts: Iterable[str]) -> Tokenizer:
  """Trains "bpe:N" on `texts`, saves it in `folder` and returns it.

  The same texts give the same file, byte for byte. Every text can be encoded and decoded exactly.

  Raises:
    DataError: the texts do not have enough distinct pairs for N entries.
  """
  size = bpe_size(spec)
  inner = tokenizers.Tokenizer(tokenizers.models.BPE())
  inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  inner.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=size,
    show_progress=False,
    special_tokens=[END_OF_TEXT[0]],
    initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
  )
  inner.train_from_iterator((piece for text in texts for piece in split(text)), trainer)
  found = inner.get_vocab_size()
  if found < size:
    raise DataError(
      f"the training text supports only {found} entries for data.tokenizer={spec!r}; use"
      f" 'bpe:{found}' or fewer, or more text."
    )
  path = bpe_path(folder)
  with writing(path):
    replace_file(path, f"{inner.to_str(pretty=True)}\n".encode())
  return load_tokenizer(spec, folder)


def _load_file(spec: str) -> FileTokenizer:
  path = tokenizer_path(spec, "")
  if path is None or not path.exists():
    raise DataError(
      f"there is no tokenizer {spec!r}; use 'bytes', 'bpe:N', or the path of a tokenizer.json."
    )
  return FileTokenizer(path, spec)
