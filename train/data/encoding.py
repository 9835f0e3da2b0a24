"""Encoding of documents, in threads of the tokenizers library, in the order of the text."""

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from lnssm_jax.pretrained.special_tokens import Added, InText
from train.data.errors import DataError
from train.data.sources import Document
from train.data.tokenizers import FileTokenizer, Tokenizer

BATCH = 1 << 21  # characters encoded per batch
AHEAD = 2  # batches being encoded while the next is read
_MOST_WORKERS = 1024


class Encoded(NamedTuple):
  """A document: its tokens with those that the tokenizer puts around a text, and end-of-text."""

  ids: np.ndarray
  prompt: int  # tokens before the first one of the completion, or of the text
  ends: int  # tokens after the last one of the text
  size: int  # bytes of the text
  chosen: np.ndarray | None = None  # bool [tokens]: the targets, of a conversation


def encode(
  documents: Iterable[Document], tokenizer: Tokenizer, special_tokens: InText = "text"
) -> Iterator[Encoded]:
  """Yields each document, in order.

  A prompt and its completion are encoded as the one text that they are; a token that has characters
  of both counts as one of the completion. Nothing is put around a conversation.
  """
  before, after = (np.array(ids, np.int32) for ids in getattr(tokenizer, "added", Added()))
  end = np.array([tokenizer.end_of_text], np.int32)
  after = after if after[-1:].tolist() == end.tolist() else np.concatenate([after, end])

  def run(batch: list[Document]) -> list[Encoded]:
    split = lambda text: list(tokenizer.pieces(text)) if text else []
    alone = lambda document: not document.prompt and document.places is None
    parts = [split(document.text) if alone(document) else [] for document in batch]
    pieces = (piece for part in parts for piece in part)
    # In groups, because the library's results take far more memory than the ids.
    groups = (tokenizer.encode_batch(group, special_tokens) for group in grouped(pieces, len))
    encoded = itertools.chain.from_iterable(groups)
    pairs = ((text[:prompt], text[prompt:]) for text, prompt, _ in batch if prompt)
    several = grouped(pairs, lambda pair: len(pair[0]) + len(pair[1]))
    continued = itertools.chain.from_iterable(
      tokenizer.encode_continuations(group, special_tokens) for group in several
    )
    results = []
    for document, part in zip(batch, parts, strict=True):
      if document.places is not None:
        assert isinstance(tokenizer, FileTokenizer)  # which has a chat template
        ids, chosen = tokenizer.encode_places(document.text, document.places)
        results.append(Encoded(ids, 0, 0, len(document.text.encode()), chosen))
        continue
      ids, start = next(continued) if document.prompt else (None, 0)
      ids = [next(encoded) for _ in part] if ids is None else [ids]
      row = np.concatenate([before, *ids, after])
      results.append(Encoded(row, len(before) + start, len(after), len(document.text.encode())))
    return results

  pending: deque[Future[list[Encoded]]] = deque()
  with ThreadPoolExecutor(AHEAD, thread_name_prefix="tokenize") as pool:
    for batch in grouped(documents, lambda document: len(document.text)):
      pending.append(pool.submit(run, batch))
      if len(pending) > AHEAD:
        yield from pending.popleft().result()
    while pending:
      yield from pending.popleft().result()


def grouped[T](
  items: Iterable[T], characters: Callable[[T], int], least: int | None = None
) -> Iterator[list[T]]:
  """Yields the items in groups, each but the last with `least` characters, or `BATCH`."""
  group, size, least = [], 0, BATCH if least is None else least
  for item in items:
    group.append(item)
    size += characters(item)
    if size >= least:
      yield group
      group, size = [], 0
  if group:
    yield group


def limit_threads(workers: int | None) -> None:
  """Limits the threads of the tokenizers library, which reads the variable at its first call."""
  if workers is None:
    return
  if not 1 <= workers <= _MOST_WORKERS:  # each is a thread
    raise DataError(f"workers={workers} must be 1 to {_MOST_WORKERS}; omit it for one per core.")
  os.environ.setdefault("RAYON_NUM_THREADS", str(workers))
