"""A sequence in chunks and splits, for the kernels of every architecture; computed by XLA."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.linear_attention.types import Options


def recur(
  decay: jax.Array, added: jax.Array, initial: jax.Array, *, reverse: bool = False
) -> jax.Array:
  """The x that enters each n of x_{n+1} = decay_n x_n + added_n over axis 2."""
  decay = jnp.broadcast_to(decay, added.shape)
  combine = lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1])
  decays, sums = lax.associative_scan(combine, (decay, added), axis=2, reverse=reverse)
  after = decays * initial[:, :, None] + sums
  first = initial[:, :, None]
  if reverse:
    return jnp.concatenate([after[:, :, 1:], first], axis=2)
  return jnp.concatenate([first, after[:, :, :-1]], axis=2)


def tokens_in_chunks(options: Options, padded: int) -> jax.Array:
  """[N]: how many tokens before padding each chunk has."""
  chunk = options.config.chunk
  return jnp.clip(options.length - chunk * jnp.arange(padded // chunk), 0, chunk)
