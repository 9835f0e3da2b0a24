"""The delta rule on Hopper GPUs."""
