"""Shared by the kernels: wgmma products, grids of chunks and channels, decoding, device facts."""
