"""Longhorn's diagonal scan; README.md derives it."""
