"""The scans of `lnssm_jax.ops`, described for tests and benchmarks: one file each."""

from lnssm_jax.ops.attention.cases import ATTENTION
from lnssm_jax.ops.core.cases import Case, Scan
from lnssm_jax.ops.delta_rule.cases import DELTA_RULE
from lnssm_jax.ops.diagonal_scan.cases import DIAGONAL_SCAN
from lnssm_jax.ops.elementwise_decay_scan.cases import ELEMENTWISE_DECAY_SCAN
from lnssm_jax.ops.linear_attention.cases import LINEAR_ATTENTION
from lnssm_jax.ops.long_convolution.cases import LONG_CONVOLUTION
from lnssm_jax.ops.longhorn_scan.cases import LONGHORN_SCAN
from lnssm_jax.ops.selective_scan.cases import SELECTIVE_SCAN
from lnssm_jax.ops.sparse_state_attention.cases import SPARSE_STATE_ATTENTION
from lnssm_jax.ops.wkv4.cases import WKV4

SCANS = {
  scan.function.__name__: scan
  for scan in (
    LINEAR_ATTENTION,
    DIAGONAL_SCAN,
    WKV4,
    SELECTIVE_SCAN,
    LONGHORN_SCAN,
    DELTA_RULE,
    ELEMENTWISE_DECAY_SCAN,
    ATTENTION,
    LONG_CONVOLUTION,
    SPARSE_STATE_ATTENTION,
  )
}

__all__ = ["SCANS", "Case", "Scan"]
