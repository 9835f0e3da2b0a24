"""Linear attention on Hopper: WGMMA and TMA."""
