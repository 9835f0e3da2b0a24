"""The scans of `lnssm_jax.ops` with their checks: one file each."""

from tests.ops.cases.attention import ATTENTION
from tests.ops.cases.channel_states import LONGHORN_SCAN, SELECTIVE_SCAN
from tests.ops.cases.delta_rule import DELTA_RULE
from tests.ops.cases.diagonal_scan import DIAGONAL_SCAN
from tests.ops.cases.elementwise_decay_scan import ELEMENTWISE_DECAY_SCAN
from tests.ops.cases.linear_attention import LINEAR_ATTENTION
from tests.ops.cases.long_convolution import LONG_CONVOLUTION
from tests.ops.cases.sparse_state_attention import SPARSE_STATE_ATTENTION
from tests.ops.cases.wkv4 import WKV4

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
