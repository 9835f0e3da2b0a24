"""A sequence in splits that run at the same time: their initial states, forward and in reverse."""

import jax
import jax.numpy as jnp

from pallas_kernels.core.boundaries import DocumentBoundaries
from pallas_kernels.linear_attention.sequence import recur, tokens_in_chunks
from pallas_kernels.linear_attention.sm90.intra_chunk import SMALLEST_LOG_DECAY
from pallas_kernels.linear_attention.sm90.state_pipeline import (
  ChunkDecay,
  ConstantDecay,
  Normalizer,
  chunk_states,
)
from pallas_kernels.linear_attention.types import Inputs, Options


def initial_states_of_splits(
  a: jax.Array,  # [B, T, H or fewer, K], b, weight and decay: as in `chunk_states`
  b: jax.Array,
  weight: jax.Array | None,
  decay: ChunkDecay | ConstantDecay,
  initial: jax.Array | None,  # [B, H, K, V] float32; None for zeros
  normalizer: Normalizer | None,  # of one split
  options: Options,
  *,
  heads: int,  # H
  reverse: bool,
) -> tuple[jax.Array | None, Normalizer | None]:
  """[B, H, P, K, V], the state that enters each split, None for zeros; and their normalizer."""
  P = options.num_splits
  if P == 1:
    return None if initial is None else initial[:, :, None], normalizer
  shape = (b.shape[0], heads, P, a.shape[3])
  added = chunk_states(
    a,
    b,
    weight,
    decay,
    None,
    None if normalizer is None else Normalizer(shape, None, normalizer.weights, normalizer.chunk),
    heads=heads,
    options=options,
    reverse=reverse,
    store_states=False,
  )
  if isinstance(decay, ConstantDecay):
    total = total_of_constant_decay(decay.log_decay, decay.documents, options, a.shape[1])
  else:
    total = decay.total if decay.total.ndim == 4 else decay.total[..., None]
  chunks = a.shape[1] // options.config.chunk
  total = jnp.broadcast_to(total, (*total.shape[:2], chunks, total.shape[3]))
  total = total.reshape(*total.shape[:2], P, -1, total.shape[3]).prod(3)
  if initial is None:
    initial = jnp.zeros_like(added.last_state[:, :, 0])
  if normalizer is not None:
    first = jnp.zeros_like(added.last_key_sum[:, :, 0])
    first = first if normalizer.initial is None else normalizer.initial[:, :, 0]
    entering = recur(total, added.last_key_sum, first, reverse=reverse)
    normalizer = Normalizer(shape, entering, normalizer.weights, normalizer.chunk)
  return recur(total[..., None], added.last_state, initial, reverse=reverse), normalizer


def normalizer_of(
  options: Options,
  inputs: Inputs,
  initial: jax.Array | None,  # [B, H, K] float32
  weight: jax.Array | None,  # [B|1, H, T|C]: decay of each token in the state; None for 1
  d_denominator: jax.Array | None = None,  # [B, H, T]
) -> Normalizer | None:
  """The normalizer of a whole sequence, or None without one."""
  if not options.normalize:
    return None
  (B, T, _, K), H = inputs.q.shape, inputs.heads
  weights = d_denominator
  if weight is not None:
    weight = jnp.broadcast_to(jnp.tile(weight, (1, 1, T // weight.shape[2])), (B, H, T))
    weights = weight if d_denominator is None else d_denominator * weight
  initial = None if initial is None else initial[:, :, None]
  return Normalizer((B, H, 1, K), initial, weights, options.config.chunk)


def total_of_constant_decay(
  log_decay: jax.Array, documents: DocumentBoundaries, options: Options, padded: int
) -> jax.Array:
  """[B|1, H, N|1, K]: the decay of the state over each chunk, of log_decay [H, K]."""
  tokens = tokens_in_chunks(options, padded)
  if options.length == padded and documents.reset_ids is None:
    tokens = tokens[:1]
  log_decay = jnp.maximum(log_decay, SMALLEST_LOG_DECAY)
  decay = jnp.exp(tokens[:, None] * log_decay[:, None])[None]
  return documents.reset(decay, options.config.chunk)
