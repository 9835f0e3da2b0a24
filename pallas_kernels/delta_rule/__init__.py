"""The delta rule: many tokens in `op.py`, a single one in `decode.py`."""
