"""Sampling from a language model by its recurrent state: constant memory and time per token.

A prompt is read in chunks of a fixed length, then tokens are drawn one after another in a loop on
the device. Prompts of different lengths are padded on the left. The padding is a segment of its
own, so that the state is reset at each prompt's first token; between two chunks, a row whose prompt
has not begun yet is given the empty state. So no prompt sees its padding, or the other prompts.

A row's random numbers depend only on the seed, the row and the number of the token.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax.mixers.common.checks import check_positive
from lnssm_jax.models import LanguageModel, layers

# Tokens drawn per call of the device: enough to hide the cost of the call, few enough to stop soon.
_STEPS_PER_CALL = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
  """Options of `generate` and `stream`: how many tokens to draw, and how.

  Attributes:
    max_tokens: the most tokens to draw for each prompt.
    seed: of the random numbers.
    temperature: divides the logits; 0 takes the most probable token.
    top_k: draw from the k most probable tokens only.
    top_p: draw from the fewest most probable tokens whose probabilities reach p; applied after
      `top_k`.
    stop_token: a row ends before this token.
    prefill_chunk: tokens of a prompt read at once; bounds the memory of reading it.

  Raises:
    ValueError: an option is out of range; the message names it.
  """

  max_tokens: int
  seed: int = 0
  temperature: float = 1.0
  top_k: int | None = None
  top_p: float | None = None
  stop_token: int | None = None
  prefill_chunk: int = 256

  def __post_init__(self):
    check_positive("max_tokens", self.max_tokens)
    check_positive("prefill_chunk", self.prefill_chunk)
    if not 0 <= self.seed < 2**32:
      raise ValueError(f"seed={self.seed} must be in [0, 2**32): a key has 32 bits of a seed.")
    if not self.temperature >= 0:
      raise ValueError(f"temperature={self.temperature} must be at least 0 (0 is greedy).")
    if self.top_k is not None:
      check_positive("top_k", self.top_k)
    if self.top_p is not None and not 0 < self.top_p <= 1:
      raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1; None keeps all tokens.")


class _Choice(NamedTuple):
  """How a token is chosen, as far as the compiled program depends on it."""

  method: str  # "greedy", "all" (draw from the whole vocabulary) or "likely" (from the likeliest)
  candidates: int  # of "likely": how many tokens are sorted


def generate(
  model: LanguageModel, prompts: Sequence[Sequence[int]], options: SamplingOptions
) -> list[np.ndarray]:
  """Continues each prompt; returns the new tokens only, int32, one array per prompt.

      rows = generate(model, [[1, 2, 3], [5]], SamplingOptions(max_tokens=8, temperature=0))

  Args:
    prompts: lists of token ids, of any lengths of at least 1.

  Raises:
    ValueError: there is no prompt, a prompt is empty or holds an id outside the vocabulary, an
      option does not fit the vocabulary, or the model's cache cannot hold the tokens; the message
      names it.
  """
  rows = np.stack(list(stream(model, prompts, options)), axis=1)  # [B, tokens]
  return [before_stop(row, options.stop_token) for row in rows]


def before_stop(row: np.ndarray, stop_token: int | None) -> np.ndarray:
  """The tokens [N] before the first `stop_token`, or all of them."""
  return row[: np.argmax(stopped)] if (stopped := row == stop_token).any() else row


def stream(
  model: LanguageModel, prompts: Sequence[Sequence[int]], options: SamplingOptions
) -> Iterator[np.ndarray]:
  """Yields the new tokens step by step, int32 [B]; arguments and errors as in `generate`.

  A row that has ended repeats `stop_token`; the stream ends with its last row, or after
  `max_tokens` steps.
  """
  rows = _checked_prompts(prompts, model.vocab_size)
  longest = max(len(row) for row in rows) + options.max_tokens - 1  # the last token is not read
  if model.max_length is not None and longest > model.max_length:
    raise ValueError(
      f"max_tokens={options.max_tokens} after a prompt of {longest - options.max_tokens + 1} tokens"
      f" is more than the model's max_length={model.max_length} holds; ask for fewer, or build the "
      "model with another max_length in mixer_options."
    )
  top_k, stop_token = options.top_k, options.stop_token
  if top_k is not None and top_k > model.vocab_size:
    raise ValueError(
      f"top_k={top_k} is more than the vocabulary of {model.vocab_size}; None keeps all of it."
    )
  if stop_token is not None and not 0 <= stop_token < model.vocab_size:
    raise ValueError(
      f"stop_token={stop_token} is outside the vocabulary, 0 to {model.vocab_size - 1}."
    )
  return _run(model, rows, options)


def _checked_prompts(prompts, vocab_size: int) -> list[np.ndarray]:
  if isinstance(prompts, str) or any(isinstance(prompt, str) for prompt in prompts):
    raise ValueError("prompts holds text; encode it with the model's tokenizer first.")
  if len(prompts) == 0:
    raise ValueError("prompts is empty; give at least one prompt.")
  checked = [np.asarray(prompt) for prompt in prompts]
  for number, prompt in enumerate(checked):
    if prompt.ndim != 1:
      raise ValueError(
        f"prompts[{number}] has {prompt.ndim} axes instead of 1; prompts is a list of lists of "
        "token ids, also for a single prompt: [[1, 2, 3]]."
      )
    if prompt.size == 0:
      raise ValueError(
        f"prompts[{number}] is empty; give at least one token, such as the end-of-text token."
      )
    if not np.issubdtype(prompt.dtype, np.integer):
      raise ValueError(f"prompts[{number}] has dtype {prompt.dtype}; token ids must be integers.")
    if prompt.min() < 0 or prompt.max() >= vocab_size:
      raise ValueError(
        f"prompts[{number}] holds token ids from {prompt.min()} to {prompt.max()}, but the model's "
        f"vocabulary is 0 to {vocab_size - 1}; was it encoded with another tokenizer?"
      )
  return checked


def _run(model, prompts, options: SamplingOptions):
  """The generator behind `stream`, on checked arguments."""
  whole = options.top_p in (None, 1)
  if options.temperature == 0 or options.top_k == 1:
    choice = _Choice("greedy", 1)
  elif options.top_k is None and whole:
    choice = _Choice("all", model.vocab_size)
  else:
    choice = _Choice("likely", options.top_k or model.vocab_size)
  # Rounded sums of probabilities may exceed 1, but not infinity.
  limits = (jnp.float32(options.temperature), jnp.float32(np.inf if whole else options.top_p))

  state, logits = read_prompts(model, prompts, options.prefill_chunk)
  states = _apart(model, state)
  seed_key, numbers = jax.random.key(options.seed), np.arange(len(prompts))
  row_keys = jax.vmap(jax.random.fold_in, (None, 0))(seed_key, numbers)
  stop_token, ended = options.stop_token, np.zeros(len(prompts), bool)
  for first in range(0, options.max_tokens, _STEPS_PER_CALL):
    states, logits, tokens = _decode(model, states, logits, row_keys, first, limits, choice=choice)
    for row in np.asarray(tokens)[: options.max_tokens - first]:
      if stop_token is not None:
        row = np.where(ended, stop_token, row).astype(row.dtype)
        ended |= row == stop_token
      yield row
      if ended.all():
        return


def read_prompts(
  model: LanguageModel, prompts: Sequence[np.ndarray], prefill_chunk: int = 256
) -> tuple[Any, Any]:
  """Reads prompts of any lengths: (state, logits [B, vocab] of the token after each).

  The second axis of every array of the state is B. Unlike those of `generate`, prompts are not
  checked.
  """
  longest = max(len(prompt) for prompt in prompts)
  # Powers of two below the full chunk, so that short prompts of many lengths share few programs.
  chunk = min(prefill_chunk, 1 << (longest - 1).bit_length())
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


@functools.partial(jax.jit, static_argnames="choice", donate_argnames=("states", "logits"))
def _decode(model, states, logits, row_keys, first, limits, *, choice: _Choice):
  """Draws tokens `first`, `first` + 1, ...: (states, logits, tokens [steps, B])."""
  blocks = layers.apart(layers.tied(model.blocks), model.num_layers)

  def step(carry, number):
    states, logits = carry
    keys = jax.vmap(jax.random.fold_in, (0, None))(row_keys, number)
    tokens = _draw(logits, keys, limits, choice)
    states, logits = _read_one(model, blocks, states, tokens)
    return (states, logits), tokens

  (states, logits), tokens = jax.lax.scan(
    step, (states, logits), first + jnp.arange(_STEPS_PER_CALL)
  )
  return states, logits, tokens


def _read_one(model, blocks, states, tokens):
  """`model(tokens[:, None], state)` for layers apart: (states, logits [B, vocab]).

  Each layer's state is carried by itself, so that a kernel that updates it in place needs no copy:
  a scan over stacked layers copies each layer's slice out of the stack, and into another one.
  """
  states, position = states
  x = model.embed(tokens[:, None], position)
  new = []
  for block, state in zip(blocks, states, strict=True):
    x, state = block(x, state)
    new.append(state)
  position = None if position is None else position + 1
  return (new, position), model.logits(model.norm(x).astype(model.dtype))[:, 0]


def _apart(model, state):
  """(the state of each layer, the position [B, 1] of the next token if the model learns them)."""
  position = None
  if isinstance(state, layers.PositionedStates):
    state, position = state.layers, state.position[0][:, None]
  return layers.apart(state, model.num_layers), position


def _draw(logits, keys, limits, choice: _Choice):
  """One token per row, int32 [B], from logits [B, vocab] and one key per row."""
  if choice.method == "greedy":
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
  temperature, top_p = limits
  # The largest becomes 0 first, so that no temperature can overflow it.
  logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
  if choice.method == "all":
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
  logits, tokens = jax.lax.top_k(logits, choice.candidates)
  probabilities = jax.nn.softmax(logits, axis=-1)
  likelier = jnp.cumsum(probabilities, axis=-1) - probabilities  # the sum of those before it
  logits = jnp.where(likelier < top_p, logits, -jnp.inf)
  ranks = jax.vmap(jax.random.categorical)(keys, logits)
  return jnp.take_along_axis(tokens, ranks[:, None], axis=-1)[:, 0]
