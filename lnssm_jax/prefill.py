"""Reading prompts into a recurrent state, in chunks of a fixed length.

Prompts of different lengths are padded on the left. The padding is a segment of its own, so that
the state is reset at each prompt's first token; between two chunks, a row whose prompt has not
begun yet is given the empty state. So no prompt sees its padding, or the other prompts.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax.models import LanguageModel

# Tokens of all prompts, and of one, that are read at once. One H200 reads 2,048 tokens of one
# prompt in 8.4 ms at once and in 22 ms in pieces of 256; of 64 prompts in 209, 192 and 173 ms in
# pieces of 256, 512 and 2,048, whose memory grows with them.
_PREFILL_TOKENS, _LONGEST_PREFILL, _SHORTEST_PREFILL = 65_536, 2_048, 16


def default_prefill_chunk(rows: int) -> int:
  """Tokens of each of `rows` prompts that are read at once: a power of two, from 16 to 2,048.

  They are at most 65,536 over all rows, up to 4,096 rows.
  """
  chunk = 1 << (max(1, _PREFILL_TOKENS // rows).bit_length() - 1)
  return min(max(chunk, _SHORTEST_PREFILL), _LONGEST_PREFILL)


def pieces(tokens: np.ndarray, chunk: int) -> Iterator[np.ndarray]:
  """Cuts tokens [B, T] into chunks, and the rest into powers of two: few programs for any T."""
  while T := tokens.shape[1]:
    length = chunk if chunk <= T else 1 << (T.bit_length() - 1)
    yield tokens[:, :length].astype(np.int32)
    tokens = tokens[:, length:]


def read_prompts(
  model: LanguageModel, prompts: Sequence[np.ndarray], prefill_chunk: int | None = None
) -> tuple[Any, Any]:
  """Reads prompts of any lengths: (state, logits [B, vocab] of the token after each).

  The second axis of every array of the state is B. Unlike those of `generate`, prompts are not
  checked.

  Args:
    prefill_chunk: as in `generate.SamplingOptions`.
  """
  prefill_chunk = prefill_chunk or default_prefill_chunk(len(prompts))
  longest = max(len(prompt) for prompt in prompts)
  # Powers of two below the full chunk, so that short prompts of many lengths share few programs.
  chunk = min(prefill_chunk, 1 << (longest - 1).bit_length())
  if model.max_length is not None:  # padding beyond a cache makes it NaN, and attention all of it
    chunk = min(chunk, model.max_length)
  width = -(-longest // chunk) * chunk
  tokens = np.zeros((len(prompts), width), np.int32)
  for row, prompt in zip(tokens, prompts, strict=True):
    row[width - len(prompt) :] = prompt
  starts = np.array([width - len(prompt) for prompt in prompts], np.int32)

  state, logits = model.init_state(len(prompts)), None
  for first in range(0, width, chunk):
    state, logits = _prefill(model, state, tokens[:, first : first + chunk], starts - first)
  return state, logits


@functools.partial(jax.jit, donate_argnames="state")
def _prefill(model, state, tokens, starts):
  """Reads tokens [B, C]. The prompt of row b begins at starts[b], which may be < 0 or >= C."""
  C = tokens.shape[1]
  segment_ids = (jnp.arange(C) >= starts[:, None]).astype(jnp.int32)
  hidden, state = model.hidden(tokens, state, segment_ids)
  begun = starts < C
  empty = model.init_state(tokens.shape[0])
  state = jax.tree.map(
    lambda new, old: jnp.where(begun.reshape(1, -1, *(1,) * (new.ndim - 2)), new, old), state, empty
  )  # every leaf is [L, B, ...]
  return state, model.logits(hidden[:, -1])


@jax.jit
def taken(state, rows):
  """These rows of a state, copied, so that the copy may be donated."""
  return jax.tree.map(lambda x: x[:, rows], state)


@jax.jit
def extend(model, state, tokens, segment_ids=None):
  """Reads tokens [B, C] of every row after a state: (state, logits [B, vocab])."""
  hidden, state = model.hidden(tokens, state, segment_ids)
  return state, model.logits(hidden[:, -1])
