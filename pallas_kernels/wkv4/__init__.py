"""RWKV-4's scan: many tokens in `op.py`, a single one in `decode.py`."""
