"""The scans of `lnssm_jax.ops`, described for the contract: one file each."""

from tests.ops.scans.attention import ATTENTION
from tests.ops.scans.base import Case, Check, Scan
from tests.ops.scans.delta_rule import DELTA_RULE
from tests.ops.scans.diagonal_scan import DIAGONAL_SCAN
from tests.ops.scans.elementwise_decay_scan import ELEMENTWISE_DECAY_SCAN
from tests.ops.scans.linear_attention import LINEAR_ATTENTION
from tests.ops.scans.long_convolution import LONG_CONVOLUTION
from tests.ops.scans.longhorn_scan import LONGHORN_SCAN
from tests.ops.scans.selective_scan import SELECTIVE_SCAN
from tests.ops.scans.sparse_state_attention import SPARSE_STATE_ATTENTION
from tests.ops.scans.wkv4 import WKV4

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

__all__ = ["SCANS", "Case", "Check", "Scan"]
