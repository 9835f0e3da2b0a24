"""The diagonal recurrence: `op.py` has the entry point."""
