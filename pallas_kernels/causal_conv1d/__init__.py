"""The causal convolution over a few tokens on Hopper: `kernel.py` has both kernels."""
