"""Scans with N states per channel on Hopper: `op.py` with its gradient, a thread to a channel."""
