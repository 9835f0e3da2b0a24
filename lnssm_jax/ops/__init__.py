"""Pure functions on arrays: the recurrences that every mixer runs on.

Axis letters, for the whole project: `B` batch, `T` time, `H` heads, `K` key width per head, `V`
value width per head, `D` channels, `N` state width per channel, `C` chunk length. Arrays are
time-major after batch: `[B, T, H, K]`. Decays are natural logarithms, `<= 0`.

Every op returns `(out, state)` and promises:

* Splitting a sequence anywhere and passing the state on gives the same result as one call. The
  empty state is `op.init_state(...)`, or None.
* Packing documents into one row with `segment_ids` gives the same result as running them apart: the
  state is reset where the id changes, `initial_state` belongs to the first document, the returned
  state to the last.
* Gradients flow to every array argument, to `initial_state` and from the returned state, under
  `jit`, `vmap`, `jax.checkpoint`, `lax.scan` and `shard_map`; under `vmap` with some arguments that
  are not mapped, too. Then all results of an op may have the mapped axis: give it an `out_axes`.
* States, decays and sums are float32, or float64 if an input is; `out` has the dtype of the values.
* `axis_name` runs the op inside `jax.shard_map` on one shard of the sequence, with the numbers of
  the whole one; `initial_state` and the returned state are those of the whole sequence:

      part = PartitionSpec(None, "sequence")
      layer = lambda q, k, v: ops.linear_attention(q, k, v, axis_name="sequence")
      jax.shard_map(layer, mesh=mesh, in_specs=part, out_specs=(part, PartitionSpec()))(q, k, v)

* `implementation=None` takes the fastest one that supports the arguments on the default device; a
  named one runs or raises `NotImplementedError` with the reason. `supported` lists them.

`recording` collects the calls that a mixer or a model makes, with their arguments.
"""

from lnssm_jax.ops.attention.api import attention
from lnssm_jax.ops.attention.rotary import rotary_embedding
from lnssm_jax.ops.attention.types import AttentionState
from lnssm_jax.ops.causal_conv1d.api import causal_conv1d, token_shift
from lnssm_jax.ops.causal_conv1d.types import ConvState
from lnssm_jax.ops.core.dispatch import supported
from lnssm_jax.ops.core.recording import OpCall, recording
from lnssm_jax.ops.delta_rule.api import delta_rule
from lnssm_jax.ops.delta_rule.types import DeltaRuleState
from lnssm_jax.ops.diagonal_scan.api import diagonal_scan
from lnssm_jax.ops.diagonal_scan.types import DiagonalState
from lnssm_jax.ops.elementwise_decay_scan.api import elementwise_decay_scan
from lnssm_jax.ops.elementwise_decay_scan.types import DecayFunction, ElementwiseDecayState
from lnssm_jax.ops.linear_attention.api import linear_attention
from lnssm_jax.ops.linear_attention.types import LinearAttentionState
from lnssm_jax.ops.long_convolution.api import long_convolution
from lnssm_jax.ops.long_convolution.exponentials import exponential_kernel_taps
from lnssm_jax.ops.long_convolution.types import ExponentialKernel, ExponentialState
from lnssm_jax.ops.longhorn_scan.api import longhorn_scan
from lnssm_jax.ops.longhorn_scan.types import LonghornState
from lnssm_jax.ops.norms.api import normalize
from lnssm_jax.ops.selective_scan.api import selective_scan
from lnssm_jax.ops.selective_scan.types import SelectiveState
from lnssm_jax.ops.sparse_state_attention.api import sparse_state_attention
from lnssm_jax.ops.sparse_state_attention.types import SparseState
from lnssm_jax.ops.wkv4.api import wkv4
from lnssm_jax.ops.wkv4.types import WKV4State

__all__ = [
  "AttentionState",
  "ConvState",
  "DecayFunction",
  "DeltaRuleState",
  "DiagonalState",
  "ElementwiseDecayState",
  "ExponentialKernel",
  "ExponentialState",
  "LinearAttentionState",
  "LonghornState",
  "OpCall",
  "SelectiveState",
  "SparseState",
  "WKV4State",
  "attention",
  "causal_conv1d",
  "delta_rule",
  "diagonal_scan",
  "elementwise_decay_scan",
  "exponential_kernel_taps",
  "linear_attention",
  "long_convolution",
  "longhorn_scan",
  "normalize",
  "recording",
  "rotary_embedding",
  "selective_scan",
  "sparse_state_attention",
  "supported",
  "token_shift",
  "wkv4",
]
