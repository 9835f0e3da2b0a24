"""Drawing the next token of each row from logits: the options of `lnssm_jax.generate`."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax.mixers.common.checks import check_positive

_TINY, _HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
# Of a penalty, which multiplies logits or divides them: both stay in the range of float32.
_MOST_PENALTY = 1e18


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
  """Options of `generate` and `stream`: how many tokens to draw, and how.

  Attributes:
    max_tokens: the most tokens to draw for each prompt.
    seed: of the random numbers; or one for each prompt, whose text then depends on its own only.
    repetition_penalty: r, in 1e-18 to 1e18: logits z of tokens that the text has had, prompt
      included, become z / r where z > 0, else z r. 1 changes nothing.
    temperature: divides the logits then; 0 takes the most probable token.
    top_k: draw from the k most probable tokens only.
    top_p: draw from the fewest most probable tokens whose probabilities reach p; applied after
      `top_k`.
    min_p: draw only tokens at least p times as probable as the most probable one.
    stop_token: a row ends before this token, or before any of several.
    prefill_chunk: tokens of a prompt read at once; bounds the memory of reading it. None:
      `prefill.default_prefill_chunk` of the number of prompts.

  Raises:
    ValueError: an option is out of range; the message names it.
  """

  max_tokens: int
  seed: int | tuple[int, ...] = 0
  repetition_penalty: float = 1.0
  temperature: float = 1.0
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None
  stop_token: int | tuple[int, ...] | list[int] | None = None
  prefill_chunk: int | None = None

  def __post_init__(self):
    check_positive("max_tokens", self.max_tokens)
    if self.prefill_chunk is not None:
      check_positive("prefill_chunk", self.prefill_chunk)
    if not all(0 <= seed < 2**32 for seed in np.atleast_1d(np.array(self.seed, object))):
      raise ValueError(f"seed={self.seed} must be in [0, 2**32): a key has 32 bits of a seed.")
    if not (self.temperature == 0 or _TINY <= self.temperature <= _HUGE):
      raise ValueError(
        f"temperature={self.temperature} must be 0 (greedy) or in {_TINY:.2g} to {_HUGE:.2g}, the"
        " range of float32."
      )
    if self.top_k is not None:
      check_positive("top_k", self.top_k)
    if self.top_p is not None and not 0 < self.top_p <= 1:
      raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1; None keeps all tokens.")
    if self.min_p is not None and not 0 <= self.min_p <= 1:
      raise ValueError(f"min_p={self.min_p} must be in 0 to 1; None keeps all tokens.")
    if not 1 / _MOST_PENALTY <= self.repetition_penalty <= _MOST_PENALTY:
      raise ValueError(
        f"repetition_penalty={self.repetition_penalty} must be in {1 / _MOST_PENALTY:g} to"
        f" {_MOST_PENALTY:g}; 1 changes nothing."
      )

  @property
  def stop_tokens(self) -> tuple[int, ...]:
    """`stop_token` as a tuple."""
    stop = () if self.stop_token is None else self.stop_token
    return tuple(stop) if isinstance(stop, tuple | list) else (stop,)


class Choice(NamedTuple):
  """How a token is chosen, as far as the compiled program depends on it."""

  # "greedy", "all" (draw from the whole vocabulary), "likely" (from the likeliest), or "mixed":
  # each row by one of them.
  method: str
  candidates: int  # of "likely" and "mixed": how many tokens are sorted
  penalized: bool = False  # whether tokens of the text have other logits
  log_probs: bool = False  # whether they are returned


class Limits(NamedTuple):
  """Numbers of the options that the compiled program takes as arguments: scalars, or [B, 1]."""

  temperature: jax.Array | np.ndarray
  top_p: jax.Array | np.ndarray
  log_min_p: jax.Array | np.ndarray
  penalty: jax.Array | np.ndarray
  top_k: jax.Array | np.ndarray  # infinite: all


def choice_of(options: SamplingOptions, vocab_size: int, log_probs: bool) -> Choice:
  """Kind of choice that a compiled program makes for these options."""
  penalized = options.repetition_penalty != 1
  if options.temperature == 0 or options.top_k == 1:
    return Choice("greedy", 1, penalized, log_probs)
  if options.top_k is None and options.top_p in (None, 1):
    return Choice("all", vocab_size, penalized, log_probs)
  return Choice("likely", options.top_k or vocab_size, penalized, log_probs)


def limits_of(options: SamplingOptions) -> Limits:
  """Numbers of these options that a program takes as arguments."""
  # Rounded sums of probabilities may exceed 1, but not infinity.
  top_p = np.inf if options.top_p in (None, 1) else options.top_p
  log_min_p = np.log(options.min_p) if options.min_p else -np.inf
  top_k = 1 if options.temperature == 0 else options.top_k or np.inf
  numbers = (options.temperature, top_p, log_min_p, options.repetition_penalty, top_k)
  return Limits(*(np.asarray(x, np.float32) for x in numbers))


# Tokens that are sorted for rows of several options, where the least that covers them is enough.
_SORTED = 64


def common_choice(choices: Iterable[Choice], vocab_size: int) -> Choice:
  """One kind of choice for rows of several, of few in all: each is a program to compile."""
  choices = list(choices)
  most = max((c.candidates for c in choices if c.method == "likely"), default=1)
  candidates = 1 if most == 1 else min(vocab_size, _SORTED if most <= _SORTED else vocab_size)
  methods = {choice.method for choice in choices}
  method = methods.pop() if len(methods) == 1 else "mixed"
  return Choice(method, candidates, any(choice.penalized for choice in choices))


def row_keys(
  seed: int | tuple[int, ...], rows: int, numbers: Sequence[int] | None = None
) -> jax.Array:
  """A key for each row: of one seed and its number, or of its own seed as if it were alone.

  Args:
    numbers: of the rows, where they are some of several calls; None: 0, 1, ...
  """
  if isinstance(seed, tuple):
    if len(seed) != rows:
      raise ValueError(
        f"seed has {len(seed)} numbers for {rows} prompts; give one for each, or one."
      )
    seeds = np.array(seed, np.uint32)
    return jax.vmap(lambda s: jax.random.fold_in(jax.random.key(s), 0))(seeds)
  return jax.vmap(jax.random.fold_in, (None, 0))(
    jax.random.key(seed), np.asarray(numbers or range(rows))
  )


def penalized(logits, seen, limits: Limits):
  """Logits [B, vocab] with the repetition penalty; `seen` None: without."""
  if seen is None:
    return logits
  lower = jnp.where(logits > 0, logits / limits.penalty, logits * limits.penalty)
  return jnp.where(seen, lower, logits)


def draw(logits, keys, limits: Limits, choice: Choice):
  """One token per row, int32 [B], from logits [B, vocab] and one key per row."""
  if choice.method == "mixed":
    named = {method: choice._replace(method=method) for method in ("greedy", "all", "likely")}
    rest = limits._replace(temperature=jnp.where(limits.temperature == 0, 1, limits.temperature))
    greedy, every, likely = (draw(logits, keys, rest, named[method]) for method in named)
    limited = (limits.top_k < jnp.inf) | (limits.top_p < jnp.inf)
    drawn = jnp.where(limited[:, 0], likely, every)
    return jnp.where(limits.top_k[:, 0] == 1, greedy, drawn)
  if choice.method == "greedy":
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
  # The largest becomes 0 first, so that no temperature can overflow it.
  logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / limits.temperature
  probable = lambda logits: jnp.where(logits >= limits.log_min_p, logits, -jnp.inf)
  if choice.method == "all":
    return jax.vmap(jax.random.categorical)(keys, probable(logits)).astype(jnp.int32)
  logits, tokens = jax.lax.top_k(logits, choice.candidates)
  logits = jnp.where(jnp.arange(choice.candidates) < limits.top_k, logits, -jnp.inf)
  probabilities = jax.nn.softmax(logits, axis=-1)
  likelier = jnp.cumsum(probabilities, axis=-1) - probabilities  # the sum of those before it
  logits = jnp.where(likelier < limits.top_p, probable(logits), -jnp.inf)
  ranks = jax.vmap(jax.random.categorical)(keys, logits)
  return jnp.take_along_axis(tokens, ranks[:, None], axis=-1)[:, 0]


def before_stop(
  row: np.ndarray, stop_token: int | tuple[int, ...] | list[int] | None
) -> np.ndarray:
  """The tokens [N] before the first stop token, or all of them."""
  if stop_token is None:
    return row
  stops = set(np.atleast_1d(stop_token).tolist())
  # Rows are short where a server asks, of each text, and `np.isin` takes ten times as long.
  return row[: next((n for n, token in enumerate(row.tolist()) if token in stops), len(row))]
