"""A causal convolution over a few steps, each channel by itself; README.md derives its gradient."""
