"""The Longhorn scan on Hopper: what `channel_states` leaves to a scan, in `cell.py`."""
