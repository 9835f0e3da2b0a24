"""The Longhorn scan on one shard of a sequence; ops/core/sequence_parallel.py has the exchange.

A shard's summary is its last state, scanned from zero, and the product of its decays: the last
state of a scan of zeros from one. Both are one scan over twice the channels.
"""

import jax.numpy as jnp

from lnssm_jax.ops.core.channel_states import Options
from lnssm_jax.ops.core.sequence_parallel import states
from lnssm_jax.ops.longhorn_scan.types import Inputs, LonghornState


def sharded(run, inputs: Inputs, options: Options, axis_name: str):
  """(out of this shard, state after the whole sequence)."""
  del options
  x, beta, k, _, skip, state, *_ = inputs
  both = lambda x, y: jnp.concatenate([x, y], axis=-1)
  ones = jnp.concatenate([jnp.zeros_like(state.h), jnp.ones_like(state.h)], axis=1)
  twice = inputs._replace(
    x=both(x, jnp.zeros_like(x)),
    beta=both(beta, beta),
    beta_logits=None,
    beta_bias=None,
    q=k,
    skip=jnp.zeros(2 * len(skip), skip.dtype),
    state=LonghornState(ones),
  )
  _, (h,) = run(twice)
  entering, final = states(
    axis_name,
    jnp.split(h, 2, axis=1),
    state,
    lambda summary, state: LonghornState(summary[1] * state.h + summary[0]),
    inputs.segments,
  )
  return run(inputs._replace(state=entering))[0], final
