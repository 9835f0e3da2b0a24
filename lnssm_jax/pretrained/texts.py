"""Text in and out of a language model: continuing it, and how likely it is."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lnssm_jax import generate, prefill, sampling
from lnssm_jax.generate import SamplingOptions
from lnssm_jax.mixers.common.checks import check_positive
from lnssm_jax.models import LanguageModel
from lnssm_jax.pretrained.continuations import Continuation
from lnssm_jax.pretrained.special_tokens import InText
from lnssm_jax.pretrained.tokenizers import Tokenizer, encode_whole

# The model never learns to predict a document from the end of the one before it, so an empty
# prompt starts from a line feed, not from the end-of-text token, unless its tokenizer puts a token
# such as BOS before every text.
OPENING = "\n"
# Tokens whose logits are in memory at once.
_CHUNK = 256
# Batches of prompts that are sorted by their lengths together.
_SORTED = 8
# Tokens drawn between two looks for a string that ends all rows.
_LOOK = 32


class Score(NamedTuple):
  """How likely a text is to a model.

  Attributes:
    tokens: int32 [N], the scored tokens.
    log_probs: float32 [N], natural logarithm of the probability of each, given those before it.
    likeliest: bool [N], whether greedy generation would have drawn it.
  """

  tokens: np.ndarray
  log_probs: np.ndarray
  likeliest: np.ndarray

  @property
  def total(self) -> float:
    """Log-likelihood of the text, in nats."""
    return float(np.sum(self.log_probs, dtype=np.float64))

  @property
  def perplexity(self) -> float:
    """exp of the mean negative log-likelihood per token."""
    return float(np.exp(-self.total / len(self.tokens)))


def complete(
  model: LanguageModel,
  tokenizer: Tokenizer,
  prompts: Sequence[str],
  options: SamplingOptions,
  *,
  until: Sequence[str] = (),
  special_tokens: InText = "parse",
) -> list[str]:
  """Continues each prompt by at most `options.max_tokens` tokens, up to `options.stop_token`.

  A prompt is encoded as its tokenizer's own files encode it, with the tokens that they put around a
  text. The text of a continuation is that of prompt and continuation without that of the prompt.

  Args:
    until: a continuation ends before the string of these that is complete first.
    special_tokens: of a prompt; "text" for prompts from others (`Tokenizer.encode`).

  Raises:
    ValueError: the model's cache cannot hold a prompt with its continuation.
  """
  rows = [encode_prompt(tokenizer, prompt, special_tokens).tolist() for prompt in prompts]
  return complete_tokens(model, tokenizer, rows, options, until=until)


def complete_each(
  model: LanguageModel,
  tokenizer: Tokenizer,
  prompts: Sequence[str],
  options: SamplingOptions,
  *,
  batch: int = 16,
  first: int = 0,
  until: Sequence[str] = (),
  special_tokens: InText = "parse",
) -> Iterator[str]:
  """Yields the continuation of each prompt in order, as `complete`, for any number of prompts.

  `batch` prompts of similar lengths are continued at once, of eight times as many that are sorted
  by length. The random numbers of a prompt depend on its place among all prompts, not on its batch.

  Args:
    first: the number of the prompt to begin with.
  """
  check_positive("batch", batch)
  batch = min(batch, len(prompts) - first)
  for part in itertools.batched(range(first, len(prompts)), max(1, _SORTED * batch)):
    rows = {n: encode_prompt(tokenizer, prompts[n], special_tokens).tolist() for n in part}
    found: dict[int, str] = {}
    for numbers in _batches(part, batch, lambda n, rows=rows: len(rows[n])):
      seeds = options.seed
      of_rows = tuple(seeds[n] for n in numbers) if isinstance(seeds, tuple) else seeds
      own = dataclasses.replace(options, seed=of_rows)
      tokens = [rows[n] for n in numbers]
      texts = complete_tokens(model, tokenizer, tokens, own, until=until, numbers=numbers)
      found |= zip(numbers, texts, strict=True)
    yield from (found[n] for n in part)


def complete_tokens(
  model: LanguageModel,
  tokenizer: Tokenizer,
  rows: Sequence[Sequence[int]],
  options: SamplingOptions,
  *,
  until: Sequence[str] = (),
  numbers: Sequence[int] | None = None,
) -> list[str]:
  """As `complete`, for encoded prompts; `numbers` as in `generate.stream`."""
  until, stop, steps = check_until(until), options.stop_token, []
  found = [Continuation(tokenizer, row, until) for row in rows]
  stopped = [False] * len(rows)
  stream = generate.stream(model, rows, options, numbers=numbers)
  for part in itertools.batched(stream, _LOOK):
    steps += part
    if not until:
      continue
    for number, row in enumerate(np.stack(part, axis=1)):
      kept = sampling.before_stop(row, stop)
      if not stopped[number]:
        found[number].add(kept.tolist())
      stopped[number] |= len(kept) < len(row) or found[number].ended
    if all(stopped):
      break
  if not until:
    for text, row in zip(found, np.stack(steps, axis=1), strict=True):
      text.add(sampling.before_stop(row, stop).tolist())
  return [text.text for text in found]


def stream(
  model: LanguageModel,
  tokenizer: Tokenizer,
  prompt: str,
  options: SamplingOptions,
  *,
  until: Sequence[str] = (),
  special_tokens: InText = "parse",
) -> Iterator[str]:
  """Yields the continuation of one prompt in pieces; invalid options raise immediately.

  Args:
    until: as in `complete`; what may be the beginning of one of the strings is held back.
    special_tokens: as in `complete`.
  """
  tokens = encode_prompt(tokenizer, prompt, special_tokens).tolist()
  text = Continuation(tokenizer, tokens, check_until(until))
  return _pieces(generate.stream(model, [tokens], options), text, options.stop_tokens)


def scores(
  model: LanguageModel,
  tokenizer: Tokenizer,
  pairs: Sequence[tuple[str, str]],
  *,
  batch: int = 8,
  special_tokens: InText = "parse",
) -> list[Score]:
  """Scores the text of each pair (context, text), whose context is read but not scored.

  The two are encoded as the one text that they are, with the tokens that the tokenizer's files put
  around it; those after it are scored. A token that has characters of both is scored. Without a
  context, and without a token such as BOS before it, the first token of a text is its context.
  Memory does not grow with the text.

  Raises:
    ValueError: there is no token to score, the model's cache cannot hold the tokens, or the
      tokenizer is not that of the model.
  """
  before, after = tokenizer.added
  rows, starts = [], []
  found = tokenizer.encode_continuations(pairs, special_tokens)
  for (context, text), (inner, start) in zip(pairs, found, strict=True):
    start = max(1, len(before) + start)
    if len(before) + len(inner) <= start:
      raise ValueError(
        f"text={text!r:.50} has no token to score after context={context!r:.50}; give more text, or"
        " some context: the first token of a sequence has no probability."
      )
    rows.append(np.array([*before, *inner, *after], np.int32))
    starts.append(start)
  return score_tokens(model, rows, starts, batch=batch)


def encode_prompt(
  tokenizer: Tokenizer, prompt: str, special_tokens: InText = "parse"
) -> np.ndarray:
  """Tokens of a prompt; of an empty one, those before every text, or else a line feed."""
  if prompt:
    found = encode_whole(tokenizer, prompt, special_tokens)
  else:  # without those after a text, which would end it
    found = np.array(tokenizer.added.before, np.int32)
  return found if len(found) else tokenizer.encode(OPENING)


def check_until(until: Sequence[str]) -> tuple[str, ...]:
  """The strings that end a text, without empty ones, which would end every text at once.

  Raises:
    ValueError: it is no list of strings.
  """
  if isinstance(until, str):
    raise ValueError(f"until={until!r:.80} is one string; give a list of them: [{until!r:.80}].")
  strings: tuple[Any, ...] = tuple(until) if np.iterable(until) else (until,)
  for end in strings:
    if not isinstance(end, str):
      raise ValueError(
        f"until has {end!r:.80} of type {type(end).__name__}; give a list of strings."
      )
  return tuple(dict.fromkeys(filter(None, strings)))


def score_tokens(
  model: LanguageModel, rows: Sequence[np.ndarray], starts: Sequence[int], *, batch: int = 8
) -> list[Score]:
  """Scores the tokens of each row from its start (at least 1) on, `batch` rows at once.

  Rows of similar lengths are read together, padded on the right, which no scored token sees. Tokens
  before the start that several rows have in common, such as the query of a multiple choice, are
  read once: the rows continue from copies of the state after them.

  Raises:
    ValueError: the model's cache cannot hold a row, its vocabulary has not all of the tokens, or
      its logits are NaN.
  """
  limit = model.max_length
  for tokens in rows:
    if tokens.max() >= model.vocab_size:
      raise ValueError(
        f"the tokenizer gives token {tokens.max()}, but the model's vocabulary is 0 to "
        f"{model.vocab_size - 1}; use the tokenizer that the model was trained with."
      )
    if limit is not None and len(tokens) - 1 > limit:  # the last token is not read
      raise ValueError(
        f"text of {len(tokens)} tokens, with its context, is longer than the model's "
        f"max_length={limit} holds (learned positions, or the cache of softmax attention); score "
        "pieces of it, or build the model with another max_length in mixer_options."
      )
  groups: dict[bytes | int, list[int]] = {}
  for number, (tokens, start) in enumerate(zip(rows, starts, strict=True)):
    # The last token before the start is read again: its logits are those of the first scored one.
    common = np.asarray(tokens[: start - 1], np.int32).tobytes()
    groups.setdefault(common or number, []).append(number)
  alone = [numbers[0] for numbers in groups.values() if len(numbers) == 1]
  shared = [numbers for numbers in groups.values() if len(numbers) > 1]
  batch = max(1, min(batch, len(rows)))
  split, found = nnx.split(model), {}
  for numbers in _batches(alone, batch, lambda number: len(rows[number])):
    state = model.init_state(batch)
    found |= _score_batch(split, state, rows, starts, numbers, [0] * batch, limit)
  for part in _batches(shared, batch, lambda numbers: starts[numbers[0]]):
    commons = [rows[numbers[0]][: starts[numbers[0]] - 1] for numbers in part]
    states, _ = prefill.read_prompts(model, commons)
    places = {number: place for place, numbers in enumerate(part) for number in numbers}
    for numbers in _batches(places, batch, lambda number: len(rows[number]) - starts[number]):
      state = prefill.taken(states, np.array([places[number] for number in numbers]))
      read = [starts[number] - 1 for number in numbers]
      found |= _score_batch(split, state, rows, starts, numbers, read, limit)
  return [found[number] for number in range(len(rows))]


def _batches(items: Iterable[Any], size: int, key: Callable[[Any], int]) -> Iterator[list[Any]]:
  """Batches of similar items; the last one repeats its first, so that all have one shape."""
  for part in itertools.batched(sorted(items, key=key), size):
    yield [*part, *part[:1] * (size - len(part))]


def _score_batch(split, state, rows, starts, numbers, read, limit) -> dict[int, Score]:
  """Scores by row, of rows of which the state, of at most `limit` tokens, has the first `read`."""
  rest = [rows[number][skip:] for number, skip in zip(numbers, read, strict=True)]
  found = {}
  room = None if limit is None else limit - max(read)
  if room is not None and max(map(len, rest)) - 1 > room:  # the longest of another row
    for place, (number, skip) in enumerate(zip(numbers, read, strict=True)):
      alone = prefill.taken(state, np.array([place]))
      found |= _score_batch(split, alone, rows, starts, [number], [skip], limit)
    return found
  log_probs, likeliest = _score_rows(split, state, rest, room)
  for row, (number, skip) in enumerate(zip(numbers, read, strict=True)):
    tokens, start = rows[number], starts[number]
    scored = slice(start - 1 - skip, len(tokens) - 1 - skip)
    found[number] = Score(tokens[start:], log_probs[row, scored], likeliest[row, scored])
    if (nan := np.isnan(found[number].log_probs)).any():
      place = f"text {number}, token {start + np.argmax(nan)}"
      raise ValueError(generate.not_a_number(place, nnx.merge(*split)))
  return found


def _score_rows(split, state, rows, room):
  """(log-probability [B, T] of each next token, whether it is the likeliest), padded.

  Of tokens beyond the `room` of a cache everything is NaN, and in the next layer, whose weights of
  them are 0, all tokens of their chunk: there the last tokens are cut into powers of two instead.
  """
  longest = max(map(len, rows)) - 1
  # Powers of two below the full chunk, so that short texts of many lengths share few programs.
  chunk = min(_CHUNK, 1 << (longest - 1).bit_length())
  width = -(-longest // chunk) * chunk
  if room is not None and width > room:
    width = longest
  tokens = np.zeros((len(rows), width + 1), np.int32)
  for padded, row in zip(tokens, rows, strict=True):
    padded[: len(row)] = row
  (graph, params), parts = split, []
  both = zip(*(prefill.pieces(x, chunk) for x in (tokens[:, :-1], tokens[:, 1:])), strict=True)
  for inputs, targets in both:
    state, part = _score_chunk(graph, params, state, inputs, targets)
    parts.append(jax.device_get(part))
  log_probs, likeliest = zip(*parts, strict=True)
  return np.concatenate(log_probs, axis=1), np.concatenate(likeliest, axis=1)


@functools.partial(jax.jit, static_argnames="graph")
def _score_chunk(graph, params, state, inputs, targets):
  """State after inputs [B, C]; of targets [B, C] the log-probability, and whether the likeliest."""
  logits, state = nnx.merge(graph, params)(inputs, state)
  picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  log_probs = picked - jax.nn.logsumexp(logits, axis=-1)
  return state, (log_probs, jnp.argmax(logits, axis=-1) == targets)


def _pieces(steps: Iterator[np.ndarray], text: Continuation, stops: Sequence[int]) -> Iterator[str]:
  shown = 0
  for step in steps:
    if step[0] in stops:
      break
    text.add([step[0]])
    if text.ended:
      break
    now = text.shown
    yield now[shown:]
    shown = len(now)
  yield text.text[shown:]
