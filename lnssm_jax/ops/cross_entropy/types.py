"""Types of `cross_entropy`: its arguments once they are checked, its results, and the last step."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.spmd import with_axes


@with_axes
class Inputs(NamedTuple):
  """The arguments in the form that every implementation takes."""

  # The vocabulary is never sharded here, so it has the letter V.
  logits: Annotated[jax.Array, "BTV"]  # float32
  targets: Annotated[jax.Array, "BT"]  # int32
  weights: Annotated[jax.Array, "BT"]  # float32


class Options(NamedTuple):
  """Static arguments."""

  vocab_size: int  # columns from here on are padding
  logit_penalty: float
  z_loss: float
  dtype: jnp.dtype | None  # of the gradient; None: it is not computed
  vocab_axis: str | None  # mesh axis over which the compiler shards the vocabulary


class CrossEntropy(NamedTuple):
  """Terms of each position, weighted, and the gradient of their sums."""

  nats: jax.Array  # [B, T] float32
  penalty: jax.Array  # [B, T] float32
  d_logits: jax.Array | None = None  # [B, T, V], the gradient of the sum of nats + penalty


class Statistics(NamedTuple):
  """Statistics of the logits of each position, of which its terms are made, [B, T] float32."""

  largest: jax.Array  # the largest logit
  log_sum: jax.Array  # log sum exp(logit)
  target_logit: jax.Array  # any number for a target outside the vocabulary


def in_vocabulary(inputs: Inputs, options: Options) -> jax.Array:
  """[B, T] bool: whether the target is a column that is not padding."""
  return (inputs.targets >= 0) & (inputs.targets < options.vocab_size)


def weighted_terms(
  inputs: Inputs, options: Options, statistics: Statistics
) -> tuple[jax.Array, jax.Array]:
  """Nats and penalty [B, T] of each position."""
  largest, log_sum, target_logit = statistics
  nll = log_sum - target_logit
  # A target outside the vocabulary must give NaN, not the loss of a padded column.
  nll = jnp.where(in_vocabulary(inputs, options), nll, jnp.nan)
  nats = inputs.weights * jnp.where(inputs.weights != 0, nll, 0)
  penalties = 0.5 * options.logit_penalty * largest**2 + options.z_loss * log_sum**2
  return nats, inputs.weights * penalties
