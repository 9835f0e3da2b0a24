"""Sampling from a language model by its recurrent state: constant memory and time per token.

A prompt is read in chunks of a fixed length (`lnssm_jax.prefill`), then tokens are drawn one after
another in a loop on the device.

A text that is long, or that many continuations share, is read once: `read` returns a `Prefix`, from
which `generate` starts.

A row's random numbers depend only on the seed, the row and the number of the token; with a seed for
each row, not on the row.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax import sampling
from lnssm_jax.mixers.common.checks import check_positive
from lnssm_jax.models import LanguageModel, layers
from lnssm_jax.prefill import default_prefill_chunk, extend, pieces, read_prompts, taken
from lnssm_jax.sampling import SamplingOptions

if TYPE_CHECKING:
  from lnssm_jax import linen

type AnyModel = LanguageModel | linen.LanguageModel

# Tokens drawn per call of the device: enough to hide the cost of the call, few enough to stop soon.
_STEPS_PER_CALL = 32


class Prefix(NamedTuple):
  """A text of one or more rows that was read; the second axis of the state's arrays is B."""

  state: Any
  logits: jax.Array  # [B, vocab] float32, of the token after it
  seen: jax.Array  # [B, vocab] bool, whether the token is in it
  length: jax.Array  # [B] int32, its tokens


class Continuation(NamedTuple):
  """New tokens of one prompt."""

  tokens: np.ndarray  # [N] int32
  # [N] float32, of each after those before it by the model: without penalty, temperature, limits.
  log_probs: np.ndarray


def generate(
  model: AnyModel,
  prompts: Sequence[Sequence[int]],
  options: SamplingOptions,
  *,
  start: Prefix | None = None,
) -> list[np.ndarray]:
  """Continues each prompt; returns the new tokens only, int32, one array per prompt.

      rows = generate(model, [[1, 2, 3], [5]], SamplingOptions(max_tokens=8, temperature=0))

  Args:
    model: or a Linen face that is bound, `linen.LanguageModel(...).bind(variables)`.
    prompts: lists of token ids, of any lengths of at least 1; with `start` they may be empty.
    start: the text before the prompts, of one row for all or one for each.

  Raises:
    ValueError: there is no prompt, a prompt is empty or holds an id outside the vocabulary, an
      option does not fit the vocabulary or the prompts, the model's cache cannot hold the tokens,
      or its logits are NaN; the message names it.
  """
  rows = np.stack(list(stream(model, prompts, options, start=start)), axis=1)  # [B, tokens]
  return [sampling.before_stop(row, options.stop_token) for row in rows]


def generate_scored(
  model: AnyModel,
  prompts: Sequence[Sequence[int]],
  options: SamplingOptions,
  *,
  start: Prefix | None = None,
) -> list[Continuation]:
  """As `generate`, with the log-probability of each new token."""
  steps = list(_checked(model, prompts, options, start, log_probs=True))
  tokens, log_probs = (np.stack(parts, axis=1) for parts in zip(*steps, strict=True))
  rows = [sampling.before_stop(row, options.stop_token) for row in tokens]
  pairs = zip(rows, log_probs, strict=True)
  return [Continuation(row, scores[: len(row)]) for row, scores in pairs]


def stream(
  model: AnyModel,
  prompts: Sequence[Sequence[int]],
  options: SamplingOptions,
  *,
  start: Prefix | None = None,
  numbers: Sequence[int] | None = None,
) -> Iterator[np.ndarray]:
  """Yields the new tokens step by step, int32 [B]; arguments and errors as in `generate`.

  A row that has ended repeats its stop token; the stream ends with its last row, or after
  `max_tokens` steps.

  Args:
    numbers: of the prompts among those of several calls, with which the one seed gives each its
      random numbers; None: 0, 1, ...
  """
  steps = _checked(model, prompts, options, start, numbers=numbers)
  return (tokens for tokens, _ in steps)


def read(
  model: AnyModel,
  prompts: Sequence[Sequence[int]],
  *,
  start: Prefix | None = None,
  prefill_chunk: int | None = None,
) -> Prefix:
  """Reads prompts, from which `generate` can start any number of times.

  Args:
    prefill_chunk: as in `SamplingOptions`.

  Raises:
    ValueError: as `generate`.
  """
  model, rows = _checked_prompts(model, prompts, start)
  _check_length(model, rows, 1, start)
  if prefill_chunk is not None:
    check_positive("prefill_chunk", prefill_chunk)
  return _read(model, rows, prefill_chunk, start)


def not_a_number(place: str, model: LanguageModel) -> str:
  """Message about logits that are NaN at a place of a text."""
  return (
    f"the logits of {place}, are NaN: parameters of the model are NaN or infinite, or an activation"
    f" is beyond the range of dtype={jnp.dtype(model.dtype).name}; check them (lnssm-train"
    " inspect FOLDER), or load the model with dtype='float32'."
  )


def _checked(
  model, prompts, options: SamplingOptions, start, *, log_probs: bool = False, numbers=None
):
  """Checks the arguments of `generate`; the steps (tokens [B], log-probabilities [B] or None)."""
  model, rows = checked(model, prompts, options, start)
  row_keys = sampling.row_keys(options.seed, len(rows), numbers)
  return _run(model, rows, options, start, log_probs, row_keys)


def checked(
  model: Any, prompts: Any, options: SamplingOptions, start: Prefix | None = None
) -> tuple[LanguageModel, list[np.ndarray]]:
  """(the NNX model, the prompts) of arguments of `generate`; raises as that."""
  model, rows = _checked_prompts(model, prompts, start)
  if not isinstance(options, SamplingOptions):
    raise ValueError(f"options={options!r} is no SamplingOptions; give SamplingOptions(...).")
  _check_length(model, rows, options.max_tokens, start)
  if options.top_k is not None and options.top_k > model.vocab_size:
    raise ValueError(
      f"top_k={options.top_k} is more than the vocabulary of {model.vocab_size}; None keeps all "
      "of it."
    )
  for stop_token in options.stop_tokens:
    if not (isinstance(stop_token, int | np.integer) and 0 <= stop_token < model.vocab_size):
      raise ValueError(
        f"stop_token={stop_token!r} is outside the vocabulary, 0 to {model.vocab_size - 1}."
      )
  return model, rows


def _check_length(model, rows, max_tokens: int, start: Prefix | None) -> None:
  before = (
    [0] if start is None else np.asarray(start.length).tolist()
  )  # of one row for all, or each
  before *= len(rows) // len(before)
  longest = max(len(row) + length for row, length in zip(rows, before, strict=True))
  # The last token is not read.
  if model.max_length is not None and longest + max_tokens - 1 > model.max_length:
    raise ValueError(
      f"max_tokens={max_tokens} after a prompt of {longest} tokens"
      f" is more than the model's max_length={model.max_length} holds; ask for fewer, or build the "
      "model with another max_length in mixer_options."
    )


def _checked_prompts(model: Any, prompts, start: Prefix | None) -> tuple[Any, list[np.ndarray]]:
  """(the NNX model, the prompts)."""
  model = model.module() if hasattr(model, "module") else model
  if (vocab_size := getattr(model, "vocab_size", None)) is None:
    raise ValueError(f"model is of the class {type(model).__name__}; give a LanguageModel.")
  if not hasattr(prompts, "__len__") or getattr(prompts, "shape", None) == ():
    raise ValueError(f"prompts={prompts!r} is no list; give a list of lists of token ids.")
  if isinstance(prompts, str) or any(isinstance(prompt, str) for prompt in prompts):
    raise ValueError("prompts holds text; encode it with the model's tokenizer first.")
  if len(prompts) == 0:
    raise ValueError("prompts is empty; give at least one prompt.")
  if start is not None and len(start.logits) not in (1, len(prompts)):
    raise ValueError(
      f"start has {len(start.logits)} rows for {len(prompts)} prompts; give one for each, or one."
    )
  empty = np.zeros(0, np.int32)
  checked = [empty if len(np.shape(x)) and not len(x) else np.asarray(x) for x in prompts]
  for number, prompt in enumerate(checked):
    if prompt.ndim != 1:
      raise ValueError(
        f"prompts[{number}] has {prompt.ndim} axes instead of 1; prompts is a list of lists of "
        "token ids, also for a single prompt: [[1, 2, 3]]."
      )
    if prompt.size == 0 and start is not None:
      continue
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
  return model, checked


def _run(model, prompts, options: SamplingOptions, start: Prefix | None, log_probs, row_keys):
  """The generator behind `stream`, on checked arguments."""
  choice = sampling.choice_of(options, model.vocab_size, log_probs)
  limits = sampling.limits_of(options)
  prefix = _read(model, prompts, options.prefill_chunk, start)
  states, logits = apart(prefix.state, model.num_layers), prefix.logits
  seen = prefix.seen if choice.penalized else None
  del prefix  # its state is as large as those that were split from it
  stop_tokens = options.stop_tokens
  ended, last = np.zeros(len(prompts), bool), np.zeros(len(prompts), np.int32)
  for first in range(0, options.max_tokens, _STEPS_PER_CALL):
    states, logits, seen, steps = decode(
      model, None, states, logits, seen, row_keys, first, limits, choice=choice
    )
    tokens, scores, broken = jax.device_get(steps)
    for number, row in enumerate(tokens[: options.max_tokens - first]):
      if (nan := broken[number] & ~ended).any():
        raise ValueError(
          not_a_number(f"prompt {np.argmax(nan)}, new token {first + number}", model)
        )
      last = np.where(ended, last, row).astype(row.dtype)
      ended |= np.isin(last, stop_tokens)
      yield last, None if scores is None else scores[number]
      if ended.all():
        return


def _read(model, prompts, prefill_chunk: int | None, start: Prefix | None) -> Prefix:
  """Reads checked prompts, after `start` if there is one."""
  rows, vocabulary = len(prompts), model.vocab_size
  seen = np.zeros((rows, vocabulary), bool)
  for row, prompt in zip(seen, prompts, strict=True):
    row[prompt] = True
  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  if start is None:
    state, logits = read_prompts(model, prompts, prefill_chunk)
    return Prefix(state, logits, jnp.asarray(seen), jnp.asarray(lengths))
  one = len(start.logits) == 1
  before = np.zeros(rows, np.int32) if one else np.arange(rows)
  states, logits, order = [], [], []
  for length in np.unique(lengths):  # padding would reset the state
    group = np.flatnonzero(lengths == length)
    state, out = taken(start.state, before[group]), start.logits[before[group]]
    tokens = np.stack([prompts[number] for number in group])
    for piece in pieces(tokens, prefill_chunk or default_prefill_chunk(len(group))):
      state, out = extend(model, state, piece)
    states, logits, order = [*states, state], [*logits, out], [*order, *group]
  if len(states) == 1:  # in order
    (state,), (out,) = states, logits
  else:
    place = np.argsort(order)
    state = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1)[:, place], *states)
    out = jnp.concatenate(logits)[place]
  return Prefix(
    state,
    out,
    start.seen[before] | seen,
    start.length[before] + lengths,
  )


@functools.partial(
  jax.jit, static_argnames=("choice", "steps"), donate_argnames=("states", "logits", "seen")
)
def decode(
  model,
  weights,
  states,
  logits,
  seen,
  row_keys,
  first,
  limits,
  *,
  choice: sampling.Choice,
  steps: int = _STEPS_PER_CALL,
):
  """Draws tokens `first`, `first` + 1, ...: (states, logits, seen, steps).

  Of each step (tokens [B], log-probabilities [B] or None, whether logits are NaN [B]).

  Args:
    weights: `parts_of` the model, or None: each call takes them apart.
    states: `apart` of a state.
    seen: [B, vocab] bool, or None where `choice` is not penalized.
    first: the number of the next token, of all rows or of each [B].
    steps: how many tokens of each row are drawn.
  """
  blocks = _blocks(model)
  if weights is not None:
    blocks = list(map(jax.tree.unflatten, map(jax.tree.structure, blocks), weights))

  def step(carry, number):
    states, logits, seen = carry
    numbers = jnp.broadcast_to(first + number, row_keys.shape)
    keys = jax.vmap(jax.random.fold_in)(row_keys, numbers)
    tokens = sampling.draw(sampling.penalized(logits, seen, limits), keys, limits, choice)
    scores, broken = None, jnp.isnan(logits).any(axis=-1)
    if choice.log_probs:
      picked = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
      scores = picked - jax.nn.logsumexp(logits, axis=-1)
    if seen is not None:
      seen = seen.at[jnp.arange(len(tokens)), tokens].set(True)
    states, logits = _read_one(model, blocks, states, tokens)
    return (states, logits, seen), (tokens, scores, broken)

  (states, logits, seen), drawn = jax.lax.scan(step, (states, logits, seen), jnp.arange(steps))
  return states, logits, seen, drawn


def _read_one(model, blocks, states, tokens):
  """`model(tokens[:, None], state)` for layers apart: (states, logits [B, vocab]).

  Each layer's state is carried by itself, so that a kernel that updates it in place needs no copy:
  a scan over stacked layers copies each layer's slice out of the stack, and into another one.
  """
  states, position = states
  x = model.embed(tokens[:, None], position)
  new, gifts = [], layers.gifts_of(blocks[0], x, states[0], None, model.shared)
  for block, state in zip(blocks, states, strict=True):
    x, state = layers.given(block, gifts)(x, state)
    new.append(state)
  position = None if position is None else position + 1
  return (new, position), model.logits(model.norm(x).astype(model.dtype))[:, 0]


def _blocks(model) -> list[Any]:
  return layers.apart(layers.tied(model.blocks), model.num_layers)


@jax.jit
def parts_of(model):
  """The arrays of each layer's block, for many short calls of `decode`.

  A call that slices them itself copies 0.6 GB for 24 layers, in 336 operations. So many results
  and arguments take the host's time: with the calls of one batch, more than they save.
  """
  return list(map(jax.tree.leaves, _blocks(model)))


@functools.partial(jax.jit, static_argnames="num_layers")
def apart(state, num_layers: int):
  """(the state of each layer, the position [B, 1] of the next token if the model learns them).

  One program: a slice for each layer and array took 11 ms of the host for 24 layers of four.
  """
  position = None
  if isinstance(state, layers.PositionedStates):
    state, position = state.layers, state.position[0][:, None]
  return layers.apart(state, num_layers), position
