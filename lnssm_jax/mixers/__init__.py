"""NNX layers `[B, T, D] -> [B, T, D]`, one file a family: parameters and projections on top of
`lnssm_jax.ops`.

    mixer = LNSSM(512, num_heads=4, rngs=nnx.Rngs(0))
    y, state = mixer(x, state=None, segment_ids=None)

The state is a value, passed in and returned; decoding is the same call with T = 1. Modules hold
`nnx.Param`s only.
"""

from lnssm_jax.mixers.lnssm import LNSSM, LNSSMState

MIXERS = {"lnssm": LNSSM}

__all__ = ["LNSSM", "MIXERS", "LNSSMState"]
