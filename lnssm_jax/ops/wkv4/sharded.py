"""RWKV-4's scan on one shard of a sequence; ops/core/sequence_parallel.py has the exchange.

A shard's summary is the state after a run from the empty state; two states are added in log space.
"""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.sequence_parallel import states
from lnssm_jax.ops.wkv4.types import Inputs, Options, WKV4State, init_state


def sharded(run, inputs: Inputs, options: Options, axis_name: str):
  """(out of this shard, state after the whole sequence)."""
  del options
  (B, T, D), dtype = inputs.k.shape, inputs.state.max.dtype
  empty = init_state(batch=B, dim=D, dtype=dtype)
  _, added = run(inputs._replace(state=empty))
  rate = T * inputs.decay_rate.astype(dtype)

  def advance(later, state):
    scale = jnp.maximum(jnp.maximum(state.max - rate, later.max), empty.max)
    scale = jax.lax.stop_gradient(scale)
    past, present = jnp.exp((state.max - scale) - rate), jnp.exp(later.max - scale)
    sums = (past * x + present * y for x, y in zip(state[1:], later[1:], strict=True))
    return WKV4State(scale, *sums)

  entering, final = states(axis_name, added, inputs.state, advance, inputs.segments, empty=empty)
  out, _ = run(inputs._replace(state=entering))
  return out, final
