"""Scans with N states per channel on Hopper: `op.py` has the entry point.

`selective.py` and `longhorn.py` are the two recurrences that the kernels run.
"""
