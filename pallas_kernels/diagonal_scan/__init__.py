"""The diagonal recurrence on Hopper: `scan.py` has both kernels and their `custom_vjp`."""
