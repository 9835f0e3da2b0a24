"""Tokenizers by the name in a config: "bytes", "bpe:N" trained here, or a file or a folder."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Protocol

import tokenizers

from lnssm_jax.files.atomic import replace_file
from lnssm_jax.files.buckets import local
from lnssm_jax.pretrained.rwkv_tokenizer import WorldTokenizer
from lnssm_jax.pretrained.special_tokens import Added, read_settings, token_of
from lnssm_jax.pretrained.tokenizers import (
  END_OF_TEXT,
  ByteTokenizer,
  FileTokenizer,
  Tokenizer,
  split,
)
from train.data.errors import DataError, writing

# Whether the tokens, such as BOS, that a tokenizer's files put around every text are put there.
AddSpecialTokens = Literal["file", "none"]
LEAST_BPE = 257  # 256 bytes and the end of text
MOST_BPE = 2**24  # which the package allocates at once


class TokenizerSettings(Protocol):
  """The part of `train.config.Data` that is used here, documented there."""

  @property
  def folder(self) -> str: ...
  @property
  def tokenizer(self) -> str: ...
  @property
  def end_of_text(self) -> str | None: ...
  @property
  def add_special_tokens(self) -> AddSpecialTokens: ...


def tokenizer_of(data: TokenizerSettings) -> Tokenizer:
  """Loads the tokenizer of a config; errors as of `load_tokenizer`."""
  end, add = data.end_of_text, add_special_tokens_of(data)
  return load_tokenizer(data.tokenizer, local(data.folder), end, add_special_tokens=add)


def add_special_tokens_of(data: TokenizerSettings) -> AddSpecialTokens:
  """The setting of that name, or its default where settings of another program have none."""
  return getattr(data, "add_special_tokens", "file")


def no_tokenizer(spec: str) -> str:
  """Says that `spec` names none, and what does."""
  return (
    f"there is no tokenizer {spec!r}; use 'bytes', 'bpe:N', or the path of a tokenizer.json, of a"
    " folder with one (or with vocab.json and merges.txt), or of a vocabulary of RWKV World. None"
    " is downloaded by its name."
  )


def load_tokenizer(
  spec: str,
  folder: str | Path | None = None,
  end_of_text: str | None = None,
  *,
  add_special_tokens: AddSpecialTokens = "file",
) -> Tokenizer:
  """Loads the tokenizer named by `data.tokenizer`.

  Args:
    spec: "bytes"; "bpe:N", which `prepare` trained and saved in `folder`; or the path of a
      tokenizer.json, of a folder with one or with vocab.json and merges.txt (a BPE of bytes, as
      GPT-2's), or of a vocabulary of RWKV World (.txt), in which `~` and environment variables are
      expanded.
    folder: `data.folder`; only "bpe:N" needs it.
    end_of_text: the token that ends a text, of a tokenizer from a file. By default that of
      tokenizer_config.json in a folder, or one of `END_OF_TEXT`.
    add_special_tokens: "file" for texts with the tokens around them that the tokenizer's files say
      (its post-processor, `add_bos_token`, `add_eos_token`), or "none".

  Raises:
    DataError: the file is missing or unusable, or does not have N entries.
  """
  if spec == "bytes":
    return ByteTokenizer()
  if not spec.startswith("bpe:"):
    return _load_file(spec, end_of_text, None if add_special_tokens == "file" else Added())
  size = bpe_size(spec)
  if folder is None:
    raise DataError(f"the tokenizer {spec!r} is stored in the folder of its data; set data.folder.")
  path = bpe_path(folder)
  if not path.is_file():
    raise DataError(
      f"{path} does not exist: {spec!r} is trained when the data is prepared. Run"
      " `lnssm-train tokenize --config FILE`."
    )
  tokenizer = FileTokenizer(path, spec, added=Added())
  if tokenizer.vocab_size != size:
    raise DataError(
      f"{path} has {tokenizer.vocab_size} entries, but data.tokenizer={spec!r} needs {size}; set"
      f" data.tokenizer='bpe:{tokenizer.vocab_size}', or prepare the data in another data.folder."
    )
  return tokenizer


def bpe_size(spec: str) -> int:
  """Returns N of "bpe:N"."""
  number = spec.removeprefix("bpe:")
  is_number = number.isascii() and number.isdecimal() and len(number) < 10
  if not is_number or not LEAST_BPE <= int(number) <= MOST_BPE:
    raise DataError(
      f"the tokenizer {spec!r:.80} needs a whole number of entries of at least {LEAST_BPE} and at"
      f" most {MOST_BPE:,}, as in 'bpe:4096'."
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


def _load_file(spec: str, end_of_text: str | None, added: Added | None) -> Tokenizer:
  path = tokenizer_path(spec, "")
  if path is None or not path.exists():
    raise DataError(no_tokenizer(spec))
  if path.suffix == ".txt" and path.is_file():
    if end_of_text is not None:
      raise DataError(
        f"{path}: token 0 of a vocabulary of RWKV World ends a text; leave out"
        f" data.end_of_text={end_of_text!r:.80}."
      )
    return WorldTokenizer(path, spec)
  if not path.is_dir():
    return FileTokenizer(path, spec, end_of_text=end_of_text, added=added)
  end = end_of_text or token_of(read_settings(path, follow_links=True), "eos_token")
  if (path / "tokenizer.json").exists():
    return FileTokenizer(path / "tokenizer.json", spec, end_of_text=end, added=added)
  return FileTokenizer(path, spec, end_of_text=end, added=added, raw=_of_merges(path))


def _of_merges(folder: Path) -> bytes:
  """The tokenizer.json of a BPE of bytes whose vocabulary and merges are in files of their own."""
  vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
  if not (vocabulary.is_file() and merges.is_file()):
    raise DataError(
      f"the tokenizer {folder} is a folder without tokenizer.json, and without vocab.json and"
      " merges.txt; use one that has them."
    )
  try:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocabulary), str(merges)))
  except Exception as error:  # bare, in the library
    raise DataError(f"{vocabulary} and {merges} are no BPE: {error}. Copy them again.") from error
  inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  inner.decoder = tokenizers.decoders.ByteLevel()
  return inner.to_str().encode()
