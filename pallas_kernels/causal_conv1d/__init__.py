"""The causal convolution over a few steps on Hopper: `op.py`, and `conv.py`, the kernels."""
