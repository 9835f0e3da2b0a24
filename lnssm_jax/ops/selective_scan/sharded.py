"""The selective scan on one shard of a sequence; ops/core/sequence_parallel.py has the exchange.

A shard's summary is its last state, scanned from zero, and the sum of its step sizes.
"""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.channel_states import Options
from lnssm_jax.ops.core.precision import decayed
from lnssm_jax.ops.core.sequence_parallel import states
from lnssm_jax.ops.selective_scan.types import Inputs, SelectiveState


def sharded(run, inputs: Inputs, options: Options, axis_name: str):
  """(out of this shard, state after the whole sequence)."""
  del options
  empty = jax.tree.map(jnp.zeros_like, inputs.state)
  _, added = run(inputs._replace(state=empty))
  elapsed = jnp.sum(inputs.dt.astype(added.h.dtype), axis=1)

  def advance(summary, state):
    added, elapsed = summary
    return SelectiveState(decayed(elapsed[..., None] * inputs.a, state.h) + added.h)

  entering, final = states(axis_name, (added, elapsed), inputs.state, advance, inputs.segments)
  return run(inputs._replace(state=entering))[0], final
