"""The scans of `lnssm_jax.ops.cases` with their checks: one file each, and none without."""

from lnssm_jax.ops import cases
from tests.ops.cases.attention import ATTENTION
from tests.ops.cases.channel_states import LONGHORN_SCAN, SELECTIVE_SCAN
from tests.ops.cases.delta_rule import DELTA_RULE
from tests.ops.cases.diagonal_scan import DIAGONAL_SCAN
from tests.ops.cases.elementwise_decay_scan import ELEMENTWISE_DECAY_SCAN
from tests.ops.cases.linear_attention import LINEAR_ATTENTION
from tests.ops.cases.long_convolution import LONG_CONVOLUTION
from tests.ops.cases.sparse_state_attention import SPARSE_STATE_ATTENTION
from tests.ops.cases.wkv4 import WKV4

_CHECKED = (
  ATTENTION,
  DELTA_RULE,
  DIAGONAL_SCAN,
  ELEMENTWISE_DECAY_SCAN,
  LINEAR_ATTENTION,
  LONG_CONVOLUTION,
  LONGHORN_SCAN,
  SELECTIVE_SCAN,
  SPARSE_STATE_ATTENTION,
  WKV4,
)
_BY_FUNCTION = {scan.function: scan for scan in _CHECKED}
SCANS = {name: _BY_FUNCTION[scan.function] for name, scan in cases.SCANS.items()}
