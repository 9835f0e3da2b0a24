"""The delta rule on one shard of a sequence; ops/core/sequence_parallel.py has the exchange.

A shard's summary is the last state of a run from zero, and that of a run of zeros from the
identity: the product of its transitions. With one rate per value column each column has a
transition of its own, and K times as many columns are run.
"""

import jax.numpy as jnp

from lnssm_jax.ops.core.sequence_parallel import states
from lnssm_jax.ops.delta_rule.types import DeltaRuleState, Inputs, Options


def sharded(run, inputs: Inputs, options: Options, axis_name: str):
  """(out of this shard, state after the whole sequence)."""
  initial, v, beta = inputs.state, inputs.v, inputs.beta
  B, H, K, V = initial.kv.shape
  zeros = DeltaRuleState(jnp.zeros(initial.kv.shape, initial.kv.dtype))
  _, added = run(inputs._replace(state=zeros))
  columns = beta.shape[-1]
  # Column (v, j) of the values starts as unit vector j, and has the rate of column v.
  units = jnp.tile(jnp.eye(K, dtype=initial.kv.dtype), (B, H, 1, columns))
  transition = inputs._replace(
    q=inputs.q if inputs.q.shape[2] > inputs.k.shape[2] else inputs.k,  # read by nobody
    v=jnp.zeros((*v.shape[:3], columns * K), v.dtype),
    beta=jnp.repeat(beta, K, axis=-1) if columns > 1 else beta,
    write_key=None,  # it writes zeros
    state=DeltaRuleState(units),
  )
  _, (kept,) = run(transition, options._replace(scale=1.0, fresh=False))
  kept = kept.reshape(B, H, K, columns, K)

  def advance(summary, state):
    added, kept = summary
    carried = jnp.einsum(
      "bhkcj,bhjcw->bhkcw", kept, state.kv.reshape(B, H, K, columns, -1), precision="highest"
    )
    return DeltaRuleState(carried.reshape(B, H, K, V) + added.kv)

  entering, final = states(axis_name, (added, kept), initial, advance, inputs.segments)
  out, _ = run(inputs._replace(state=entering), options._replace(fresh=False))
  return out, final
