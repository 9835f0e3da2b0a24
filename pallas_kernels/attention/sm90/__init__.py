"""Softmax attention on Hopper: WGMMA, TMA and registers that warpgroups pass on."""
