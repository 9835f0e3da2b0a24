"""RWKV-4's scan on Hopper: `forward.py` (with the `custom_vjp`), `backward.py`, `decode.py`."""
