"""Cross-entropy for XLA: a reduction of the logits, then a pass for the gradient."""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.cross_entropy.types import (
  Inputs,
  Options,
  Statistics,
  in_vocabulary,
  weighted_terms,
)

# Below any logit, and finite, because -inf - (-inf) would be NaN.
_LOWEST = float(jnp.finfo(jnp.float32).min)


def reference(inputs: Inputs, options: Options) -> tuple[jax.Array, ...]:
  """The fields of `CrossEntropy`; the gradient only if `options.dtype` is given."""
  logits, targets, weights = inputs
  vocab = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
  if logits.shape[-1] > options.vocab_size:
    logits = jnp.where(vocab < options.vocab_size, logits, _LOWEST)
  largest, normalizer, ties = _softmax_sums(logits)
  place = jnp.where(in_vocabulary(inputs, options), targets, 0)[..., None]
  if options.vocab_axis is None:
    target_logit = jnp.take_along_axis(logits, place, axis=-1)[..., 0]
  else:
    # The compiler aborts on a gather along a sharded axis inside shard_map.
    target_logit = jnp.where(vocab == place, logits, 0).sum(-1)
  log_sum = largest + jnp.log(normalizer)
  terms = weighted_terms(inputs, options, Statistics(largest, log_sum, target_logit))
  if options.dtype is None:
    return terms
  d = jnp.exp(logits - largest[..., None]) / normalizer[..., None]
  if options.z_loss:
    d *= 1 + 2 * options.z_loss * log_sum[..., None]
  d -= vocab == targets[..., None]
  if options.logit_penalty:
    share = options.logit_penalty * largest / ties  # ties share the gradient, as in jnp.max
    d += jnp.where(logits == largest[..., None], share[..., None], 0)
  return *terms, (weights[..., None] * d).astype(options.dtype)


def _softmax_sums(logits):
  """Reduces the last axis to the largest logit, sum exp(logit - largest), and the number of ties.

  One pass, which reads logits once: each partial sum is relative to its own maximum.
  """

  def combine(left, right):
    (m, total, ties), (n, added, more) = left, right
    largest = jnp.maximum(m, n)
    total = total * jnp.exp(m - largest) + added * jnp.exp(n - largest)
    ties = jnp.where(m == largest, ties, 0) + jnp.where(n == largest, more, 0)
    return largest, total, ties

  one = jnp.ones_like(logits)
  start = (jnp.float32(_LOWEST), jnp.float32(0), jnp.float32(0))
  return jax.lax.reduce((logits, one, one), start, combine, (logits.ndim - 1,))
