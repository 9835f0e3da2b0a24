"""RWKV-4's scan on Hopper: `op.py` with its gradient, `scan.py` and `adjoint.py` the kernels."""
