"""Running along time chunk by chunk, without copying any array into another layout."""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.checks import vary_alike


def over_chunks(chunk, carry, by_step, by_chunk=(), *, size, reverse):
  """Runs `chunk(carry, by_step, by_chunk) -> carry, (results_by_step, results_by_chunk)`.

  `by_step` is cut along axis 1; an array of length 1 there is the same for all steps. `by_chunk`
  has one row per chunk. The steps that fill no chunk, at the end of time, are a shorter chunk of
  their own. Returns the carry, the results by step joined and the results by chunk stacked.
  """
  length = max(x.shape[1] for x in jax.tree.leaves(by_step))
  size = min(size, length)
  count, rest = divmod(length, size)
  if count == 1 and not rest:
    carry, (by_step, by_chunk) = chunk(carry, by_step, jax.tree.map(lambda x: x[0], by_chunk))
    return carry, by_step, jax.tree.map(lambda x: x[None], by_chunk)

  def cut(start, size):
    slice_ = lambda x: x if x.shape[1] == 1 else jax.lax.dynamic_slice_in_dim(x, start, size, 1)
    return jax.tree.map(slice_, by_step)

  def place(carry_and_results, start, size, by_chunk):
    carry, results = carry_and_results
    carry, (pieces, summary) = chunk(carry, cut(start, size), by_chunk)
    put = lambda x, piece: jax.lax.dynamic_update_slice_in_dim(x, piece, start, 1)
    return (carry, jax.tree.map(put, results, pieces)), summary

  row = lambda n: jax.tree.map(lambda x: x[n], by_chunk)
  _, (pieces, _) = jax.eval_shape(chunk, carry, cut(0, size), row(0))
  results = jax.tree.map(lambda x: jnp.zeros((x.shape[0], length, *x.shape[2:]), x.dtype), pieces)
  done, last = (carry, vary_alike((results, carry, by_step, by_chunk))[0]), None
  if rest and reverse:
    done, last = place(done, count * size, rest, row(-1))
  done, summaries = jax.lax.scan(
    lambda done, n_and_row: place(done, n_and_row[0] * size, size, n_and_row[1]),
    done,
    (jnp.arange(count), jax.tree.map(lambda x: x[:count], by_chunk)),
    reverse=reverse,
  )
  if rest and not reverse:
    done, last = place(done, count * size, rest, row(-1))
  if rest:
    summaries = jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), summaries, last)
  return *done, summaries
