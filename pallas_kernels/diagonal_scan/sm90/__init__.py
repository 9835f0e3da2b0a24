"""The kernels on Hopper: tokens stream through SMEM by TMA."""
