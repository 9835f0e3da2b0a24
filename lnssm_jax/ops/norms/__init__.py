"""Norms over the last axis; README.md derives their gradient."""
