"""Linear attention on Hopper: chunked forward and backward in `op.py`, one step in `decode.py`."""
