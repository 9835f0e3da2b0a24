"""The diagonal scan on one shard of a sequence; ops/core/sequence_parallel.py has the exchange.

A shard's summary is the product of its decays and its last state, scanned from zero.
"""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.sequence_parallel import states
from lnssm_jax.ops.diagonal_scan.types import DiagonalState, Inputs, Options


def sharded(run, inputs: Inputs, options: Options, axis_name: str):
  """(out of this shard, state after the whole sequence)."""
  decay, x, state, segments = inputs
  wide = decay.astype(jnp.result_type(decay, jnp.finfo(state.h.dtype).dtype))
  kept = wide[:, 0] ** x.shape[1] if decay.shape[1] == 1 else jnp.prod(wide, axis=1)
  _, added = run(inputs._replace(state=jax.tree.map(jnp.zeros_like, state)))
  entering, final = states(
    axis_name,
    (kept, added),
    state,
    lambda summary, state: DiagonalState(summary[0] * state.h + summary[1].h),
    segments,
    reverse=options.reverse,
  )
  return run(inputs._replace(state=entering))[0], final
