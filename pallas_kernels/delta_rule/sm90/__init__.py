"""The delta rule on Hopper: WGMMA, TMA and clusters."""
