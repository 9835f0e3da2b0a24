"""Depthwise causal convolution over a few tokens; README.md derives its gradient."""
