"""Softmax attention; README.md derives its forms."""
