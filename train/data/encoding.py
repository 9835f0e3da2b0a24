"""Encoding of documents, in threads of the tokenizers library, in the order of the text."""

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from train.data.errors import DataError
from train.data.sources import Document
from train.data.tokenizers import Tokenizer

BATCH = 1 << 21  # characters encoded per batch
AHEAD = 2  # batches being encoded while the next is read


def encode(
  documents: Iterable[Document], tokenizer: Tokenizer
) -> Iterator[tuple[np.ndarray, int, int]]:
  """Yields (ids with end-of-text, ids of the prompt, bytes) of each document, in order."""

  def run(batch: list[Document]) -> list[tuple[np.ndarray, int, int]]:
    split = lambda text: list(tokenizer.pieces(text)) if text else []
    parts = [(split(text[:prompt]), split(text[prompt:])) for text, prompt in batch]
    pieces = (piece for prompt, rest in parts for piece in (*prompt, *rest))
    # In groups, because the library's results take far more memory than the ids.
    groups = (tokenizer.encode_batch(group) for group in _batches(pieces, len))
    encoded = itertools.chain.from_iterable(groups)
    end = np.array([tokenizer.end_of_text], np.int32)
    results = []
    for document, (prompt, rest) in zip(batch, parts, strict=True):
      ids = [next(encoded) for _ in (*prompt, *rest)]
      before = sum(map(len, ids[: len(prompt)]))
      results.append((np.concatenate([*ids, end]), before, len(document.text.encode())))
    return results

  pending: deque[Future[list[tuple[np.ndarray, int, int]]]] = deque()
  with ThreadPoolExecutor(AHEAD, thread_name_prefix="tokenize") as pool:
    for batch in _batches(documents, lambda document: len(document.text)):
      pending.append(pool.submit(run, batch))
      if len(pending) > AHEAD:
        yield from pending.popleft().result()
    while pending:
      yield from pending.popleft().result()


def _batches[T](items: Iterable[T], characters: Callable[[T], int]) -> Iterator[list[T]]:
  batch, size = [], 0
  for item in items:
    batch.append(item)
    size += characters(item)
    if size >= BATCH:
      yield batch
      batch, size = [], 0
  if batch:
    yield batch


def limit_threads(workers: int | None) -> None:
  """Limits the threads of the tokenizers library, which reads the variable at its first call."""
  if workers is None:
    return
  if workers < 1:
    raise DataError(f"workers={workers} must be at least 1; omit it for one per core.")
  os.environ.setdefault("RAYON_NUM_THREADS", str(workers))
