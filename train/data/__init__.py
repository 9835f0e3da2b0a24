"""Text to training batches: sources -> tokens -> `.bin/.idx` pairs -> windows -> batches.

    sources.py     files, folders, globs, rows of JSON -> documents (text)
    tokenizers.py  text <-> token ids
    preflight.py   checks of tokenizer and sets before time is spent
    tokenize.py    documents -> token files, by way of encoding.py, with sidecars.py: counts and
                   fingerprints
    labels.py      which tokens of a document are targets
    indexed.py     the token files themselves: a checked reader and an atomic writer
    windows.py     token files -> windows of a fixed length -> shuffled batches of one set or of a
                   mixture, by step number

Nothing here needs an accelerator, and only `windows` imports Grain (which imports JAX), so that
tokenizing starts quickly.
"""

from train.data.errors import DataError
from train.data.indexed import IndexedDataset, IndexedWriter, dtype_for
from train.data.sidecars import read_sidecar
from train.data.tokenize import load_or_train, prepare, tokenize_to
from train.data.tokenizers import Tokenizer, load_tokenizer

__all__ = [
  "DataError",
  "IndexedDataset",
  "IndexedWriter",
  "Tokenizer",
  "dtype_for",
  "load_or_train",
  "load_tokenizer",
  "prepare",
  "read_sidecar",
  "tokenize_to",
]
