"""The selective scan (S6) on Hopper: what `channel_states` leaves to a scan, in `cell.py`."""
