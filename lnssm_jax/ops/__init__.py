"""Pure functions on arrays: the recurrences that every mixer runs on.

Axis letters, for the whole project: `B` batch, `T` time, `H` heads, `K` key width per head, `V`
value width per head, `D` channels, `N` state width per channel, `C` chunk length. Arrays are
time-major after batch: `[B, T, H, K]`. Decays are natural logarithms, `<= 0`.
"""

from lnssm_jax.ops.attention.api import attention
from lnssm_jax.ops.attention.rotary import rotary_embedding
from lnssm_jax.ops.attention.state import (
  AttentionState,
  attention_positions,
  init_attention_state,
)
from lnssm_jax.ops.causal_conv1d.api import causal_conv1d
from lnssm_jax.ops.delta_rule.api import delta_rule
from lnssm_jax.ops.delta_rule.state import DeltaRuleState
from lnssm_jax.ops.diagonal_scan.api import diagonal_scan
from lnssm_jax.ops.diagonal_scan.state import DiagonalState
from lnssm_jax.ops.dispatch import supported
from lnssm_jax.ops.elementwise_decay_scan.api import DecayFunction, elementwise_decay_scan
from lnssm_jax.ops.elementwise_decay_scan.state import ElementwiseDecayState
from lnssm_jax.ops.linear_attention.api import linear_attention
from lnssm_jax.ops.linear_attention.state import LinearAttentionState
from lnssm_jax.ops.long_convolution.api import long_convolution
from lnssm_jax.ops.long_convolution.exponentials import exponential_kernel_taps
from lnssm_jax.ops.long_convolution.state import (
  ExponentialKernel,
  ExponentialState,
  LongConvolutionState,
)
from lnssm_jax.ops.longhorn_scan.api import longhorn_scan
from lnssm_jax.ops.longhorn_scan.state import LonghornState
from lnssm_jax.ops.selective_scan.api import selective_scan
from lnssm_jax.ops.selective_scan.state import SelectiveState
from lnssm_jax.ops.sparse_state_attention.api import sparse_state_attention
from lnssm_jax.ops.sparse_state_attention.state import SparseState
from lnssm_jax.ops.wkv4.api import wkv4
from lnssm_jax.ops.wkv4.state import WKV4State

__all__ = [
  "AttentionState",
  "DecayFunction",
  "DeltaRuleState",
  "DiagonalState",
  "ElementwiseDecayState",
  "ExponentialKernel",
  "ExponentialState",
  "LinearAttentionState",
  "LongConvolutionState",
  "LonghornState",
  "SelectiveState",
  "SparseState",
  "WKV4State",
  "attention",
  "attention_positions",
  "causal_conv1d",
  "delta_rule",
  "diagonal_scan",
  "elementwise_decay_scan",
  "exponential_kernel_taps",
  "init_attention_state",
  "linear_attention",
  "long_convolution",
  "longhorn_scan",
  "rotary_embedding",
  "selective_scan",
  "sparse_state_attention",
  "supported",
  "wkv4",
]
