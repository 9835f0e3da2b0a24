"""Softmax attention in three forms, which README.md derives."""
