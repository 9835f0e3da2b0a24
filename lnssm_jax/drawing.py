"""How the next token of each row is drawn from logits, as `lnssm_jax.generate` does."""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
  from lnssm_jax.generate import SamplingOptions


class Choice(NamedTuple):
  """How a token is chosen, as far as the compiled program depends on it."""

  method: str  # "greedy", "all" (draw from the whole vocabulary) or "likely" (from the likeliest)
  candidates: int  # of "likely": how many tokens are sorted
  penalized: bool = False  # whether tokens of the text have other logits
  log_probs: bool = False  # whether they are returned


class Limits(NamedTuple):
  """Numbers of the options that the compiled program takes as arguments."""

  temperature: jax.Array
  top_p: jax.Array
  log_min_p: jax.Array
  penalty: jax.Array


def choice_of(options: "SamplingOptions", vocab_size: int, log_probs: bool) -> Choice:
  """Kind of choice that a compiled program makes for these options."""
  penalized = options.repetition_penalty != 1
  if options.temperature == 0 or options.top_k == 1:
    return Choice("greedy", 1, penalized, log_probs)
  if options.top_k is None and options.top_p in (None, 1):
    return Choice("all", vocab_size, penalized, log_probs)
  return Choice("likely", options.top_k or vocab_size, penalized, log_probs)


def limits_of(options: "SamplingOptions") -> Limits:
  """Numbers of these options that a program takes as arguments."""
  # Rounded sums of probabilities may exceed 1, but not infinity.
  top_p = np.inf if options.top_p in (None, 1) else options.top_p
  log_min_p = np.log(options.min_p) if options.min_p else -np.inf
  numbers = (options.temperature, top_p, log_min_p, options.repetition_penalty)
  return Limits(*map(jnp.float32, numbers))


def row_keys(seed: int | tuple[int, ...], rows: int) -> jax.Array:
  """A key for each row: of one seed and its number, or of its own seed as if it were alone."""
  if isinstance(seed, tuple):
    if len(seed) != rows:
      raise ValueError(
        f"seed has {len(seed)} numbers for {rows} prompts; give one for each, or one."
      )
    seeds = np.array(seed, np.uint32)
    return jax.vmap(lambda s: jax.random.fold_in(jax.random.key(s), 0))(seeds)
  return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), np.arange(rows))


def penalized(logits, seen, limits: Limits):
  """Logits [B, vocab] with the repetition penalty; `seen` None: without."""
  if seen is None:
    return logits
  lower = jnp.where(logits > 0, logits / limits.penalty, logits * limits.penalty)
  return jnp.where(seen, lower, logits)


def draw(logits, keys, limits: Limits, choice: Choice):
  """One token per row, int32 [B], from logits [B, vocab] and one key per row."""
  if choice.method == "greedy":
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
  # The largest becomes 0 first, so that no temperature can overflow it.
  logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / limits.temperature
  probable = lambda logits: jnp.where(logits >= limits.log_min_p, logits, -jnp.inf)
  if choice.method == "all":
    return jax.vmap(jax.random.categorical)(keys, probable(logits)).astype(jnp.int32)
  logits, tokens = jax.lax.top_k(logits, choice.candidates)
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
  return row[: np.argmax(stopped)] if (stopped := np.isin(row, stop_token)).any() else row
