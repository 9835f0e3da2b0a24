"""Causal convolutions with long kernels, in several forms, which README.md derives."""
