r"""How fast a model forgets: log decays, half-lives, receptive fields.

    h = log 2 / -mean_t log a_t                              the half-life of a channel, in tokens
    R_t = max {t - s : prod_{s < j <= t} a_j >= threshold}   its receptive field at token t

Source of the receptive field: SSE (Pan et al. 2025), the analysis of states: over the last 128
tokens, threshold 1e-3, and for partitions the product over the steps that selected them.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.analysis.layers import each_layer, names_of_mixers
from lnssm_jax.mixers import Mixer
from lnssm_jax.mixers.common.checks import check_positive
from lnssm_jax.models import LanguageModel
from lnssm_jax.ops.core.segments import segments_of

_NAME = "analysis"


class SlowestHead(NamedTuple):
  """The head of a model that remembers longest."""

  layer: int
  head: int
  half_life: float  # in tokens: half of its channels have a longer one


def decays(
  model: LanguageModel | Mixer,
  inputs: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
) -> list[jax.Array | None]:
  """The log decays of each layer, as `Mixer.decay` returns them; None for a layer without.

  Args:
    inputs: tokens [B, T] of a language model, x [B, T, D] of a mixer. None will do where all
      decays are constants.
    segment_ids: [B, T], as for a call of the model.

  Raises:
    ValueError: `inputs` is None and decays depend on it, or `inputs` do not fit the model.
    NotImplementedError: no layer has a decay.
  """
  return _each(_decay, model, inputs, segment_ids)


def half_lives(
  model: LanguageModel | Mixer,
  inputs: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
) -> list[jax.Array | None]:
  """Half-lives in tokens of each layer's channels, [H, K] float32; None for a layer without decay.

      lives = analysis.half_lives(model)               # constant decays
      lives = analysis.half_lives(model, tokens)       # data-dependent ones: the mean over tokens

  After h tokens of the mean decay of the text, half of a number in the state is left. A channel
  that never forgets has inf, one that forgets everything at some token 0. H and K are those of
  `Mixer.decay`, and so are the errors of `decays`.
  """
  return _each(_half_life, model, inputs, segment_ids)


def slowest_head(lives: list[jax.Array | None]) -> SlowestHead:
  """The head with the largest median half-life of its channels, out of `half_lives`.

  Raises:
    ValueError: no layer has a half-life.
  """
  heads = [
    SlowestHead(layer, head, float(life))
    for layer, channels in enumerate(lives)
    if channels is not None
    for head, life in enumerate(jnp.median(channels.reshape(len(channels), -1), axis=1))
  ]
  if not heads:
    raise ValueError(f"{_NAME}: lives holds no half-life; give what `half_lives` returned.")
  return max(heads, key=lambda head: head.half_life)


@functools.partial(jax.jit, static_argnames=("window", "threshold"))
def receptive_field(
  log_decay: jax.Array,
  segment_ids: jax.Array | None = None,
  *,
  window: int = 128,
  threshold: float = 1e-3,
) -> jax.Array:
  """The receptive field of each channel at each of the last tokens, in tokens.

  A token's own contribution has distance 0; a document boundary ends the field, as does the start.

  Args:
    log_decay: [B, T, H, ...], values <= 0, such as `Mixer.decay(x)`; -inf forgets everything.
    segment_ids: [B, T] integer.
    window: W, how many of the last tokens are looked at; at most T are.
    threshold: the product of decays that still counts, in (0, 1].

  Returns:
    int32 [B, min(W, T), H, ...].

  Raises:
    ValueError: an argument is out of its range.
  """
  if log_decay.ndim < 4:
    raise ValueError(
      f"{_NAME}: log_decay has shape {log_decay.shape}, but [B, T, H, K] is needed; broadcast "
      "constants to the tokens, or call `receptive_fields`."
    )
  if not 0 < threshold <= 1:
    raise ValueError(f"{_NAME}: threshold={threshold} must be above 0 and at most 1.")
  B, T = log_decay.shape[:2]
  W = min(check_positive("window", window), T)
  if (segments := segments_of(_NAME, segment_ids, B, T)) is not None:
    first = segments.first().reshape(B, T, *[1] * (log_decay.ndim - 2))
    log_decay = jnp.where(first, -jnp.inf, log_decay)
  token = T - W + jnp.arange(W).reshape(1, W, *[1] * (log_decay.ndim - 2))

  def longer(carry, step):  # from s + 1 to s
    (total, field), (decay, s) = carry, step
    total = jnp.where(token > s, total + decay[:, None], total)
    return (total, field + ((token > s) & (total >= math.log(threshold)))), None

  start = jnp.zeros((B, W, *log_decay.shape[2:]), log_decay.dtype)
  steps = (jnp.moveaxis(log_decay, 1, 0)[1:], jnp.arange(T - 1))
  (_, field), _ = jax.lax.scan(longer, (start, start.astype(jnp.int32)), steps, reverse=True)
  return field


def receptive_fields(
  model: LanguageModel | Mixer,
  inputs: jax.Array,
  segment_ids: jax.Array | None = None,
  *,
  window: int = 128,
  threshold: float = 1e-3,
) -> list[jax.Array | None]:
  """`receptive_field` of each layer, int32 [B, min(W, T), H, K]; None for a layer without decay.

  Arguments are those of `decays` and of `receptive_field`, and so are the errors.
  """
  if inputs is None:
    raise ValueError(f"{_NAME}: inputs=None, but a receptive field is that of a text; give one.")
  return _each(_field, model, inputs, segment_ids, (window, threshold))


def _each(function, model, inputs, segment_ids, options=()) -> list[Any]:
  try:
    found = each_layer(function, model, inputs, segment_ids, options=options)
  except ValueError as error:
    if inputs is not None or isinstance(model, Mixer) or "x=None" not in str(error):
      raise
    raise ValueError(
      f"{_NAME}: inputs=None, but decays of {names_of_mixers(model)} depend on the text; give"
      " tokens [B, T], such as jnp.array([loaded.tokenizer.encode(text)])."
    ) from None
  if all(result is None for result in found):
    names = names_of_mixers(model)
    raise NotImplementedError(f"{_NAME}: no layer has a decay; the mixers are {names}.")
  return found


def _decay(mixer, x, segment_ids):
  try:
    return mixer.decay(x, None, segment_ids)
  except NotImplementedError:
    return None


def _half_life(mixer, x, segment_ids):
  decay = _decay(mixer, x, segment_ids)
  if decay is None:
    return None
  mean = jnp.mean(decay, axis=(0, 1)) if x is not None and decay.ndim >= 4 else decay
  return math.log(2) / jnp.abs(mean)  # abs: of -0. too


def _field(mixer, x, segment_ids, window, threshold):
  decay = _decay(mixer, x, segment_ids)
  if decay is None:
    return None
  if decay.ndim < 4:
    decay = jnp.broadcast_to(decay, (*x.shape[:2], *decay.shape))
  return receptive_field(decay, segment_ids, window=window, threshold=threshold)
