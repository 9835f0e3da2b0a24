"""Kernels for every NVIDIA GPU since Ampere: products by `mma.sync`, copies through registers."""
