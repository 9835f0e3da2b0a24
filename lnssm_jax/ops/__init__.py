"""Pure functions on arrays: the recurrences that every mixer runs on.

Axis letters, for the whole project: `B` batch, `T` time, `H` heads, `K` key width per head, `V`
value width per head, `C` chunk length. Arrays are time-major after batch: `[B, T, H, K]`. Decays
are natural logarithms, `<= 0`.
"""

from lnssm_jax.ops.dispatch import supported
from lnssm_jax.ops.linear_attention.api import linear_attention
from lnssm_jax.ops.linear_attention.state import LinearAttentionState

__all__ = ["LinearAttentionState", "linear_attention", "supported"]
