"""Mosaic-GPU kernels for Hopper, written in Pallas. Imports nothing of `lnssm_jax`.

Importing works on any machine; running needs a Hopper GPU, or `interpret` on a CPU.
"""

# The name, for `jax.checkpoint_policies`, of what forward kernels leave to the backward pass.
MADE_BY_KERNELS = "made by kernels"
