"""Checkpoints: Orbax behind one module, digests of every file, retries of failed saves."""
