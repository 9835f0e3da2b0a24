"""Sequence models whose cost is linear in length: scans, mixers, language models for JAX and Flax.

Start with `lnssm_jax.ops` (pure functions on arrays), `lnssm_jax.mixers` (NNX layers
`[B, T, D] -> [B, T, D]`) or `lnssm_jax.models` (whole models). Importing this package needs JAX
and Flax only, and no accelerator.
"""

__version__ = "0.1.0"
