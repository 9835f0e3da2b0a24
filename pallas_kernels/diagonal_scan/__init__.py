"""The diagonal recurrence on Hopper: `op.py` with its gradient, `scan.py` the kernels."""
