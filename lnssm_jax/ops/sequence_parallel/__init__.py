"""The scans, attention and what crosses borders, on sequences that are divided over devices.

def layer(q, k, v):  # each of n devices has T / n steps
  return sequence_parallel.linear_attention(q, k, v, axis_name="sequence")

part = PartitionSpec(None, "sequence")
jax.shard_map(layer, mesh=mesh, in_specs=part, out_specs=(part, PartitionSpec()))(q, k, v)
"""

from lnssm_jax.ops.sequence_parallel.attention import attention
from lnssm_jax.ops.sequence_parallel.borders import (
  continues,
  inputs_before,
  of_last,
  step_positions,
)
from lnssm_jax.ops.sequence_parallel.channels import (
  diagonal_scan,
  long_convolution,
  longhorn_scan,
  selective_scan,
  wkv4,
)
from lnssm_jax.ops.sequence_parallel.exchange import states
from lnssm_jax.ops.sequence_parallel.matrix_states import (
  delta_rule,
  elementwise_decay_scan,
  linear_attention,
)

__all__ = [
  "attention",
  "continues",
  "delta_rule",
  "diagonal_scan",
  "elementwise_decay_scan",
  "inputs_before",
  "linear_attention",
  "long_convolution",
  "longhorn_scan",
  "of_last",
  "selective_scan",
  "states",
  "step_positions",
  "wkv4",
]
