"""Causal convolutions with long kernels; README.md derives their forms."""
