"""The scan on one shard of a sequence; ops/core/sequence_parallel.py has the exchange.

A shard's summary is the last state of a run from zero, and that of a run of zeros from one: the
product of its decays. Both are one run with twice as many value columns.
"""

import dataclasses

import jax.numpy as jnp

from lnssm_jax.ops.core.sequence_parallel import states
from lnssm_jax.ops.core.spmd import vary_alike
from lnssm_jax.ops.elementwise_decay_scan.types import ElementwiseDecayState, Inputs, Options


def sharded(run, inputs: Inputs, options: Options, axis_name: str):
  """(out of this shard, state after the whole sequence)."""
  del options
  _, k, v, log_decay, _, state, _ = vary_alike(inputs)
  both = lambda x, y: jnp.concatenate([x, y], axis=-1)

  def twice(steps, parameters):
    once = log_decay.make(steps, parameters)
    return both(once, once)

  _, (kv,) = run(
    inputs._replace(
      q=k,
      k=k,
      v=both(v, jnp.zeros_like(v)),
      log_decay=dataclasses.replace(log_decay, make=twice),
      read_weight=None,
      state=ElementwiseDecayState(both(jnp.zeros_like(state.kv), jnp.ones_like(state.kv))),
    )
  )
  entering, final = states(
    axis_name,
    jnp.split(kv, 2, axis=-1),
    inputs.state,
    lambda summary, state: ElementwiseDecayState(summary[1] * state.kv + summary[0]),
    inputs.segments,
  )
  out, _ = run(inputs._replace(state=entering))
  return out, final
