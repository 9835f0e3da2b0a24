"""The kernel on Hopper: logits stream through SMEM by TMA."""
