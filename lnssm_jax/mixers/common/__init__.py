"""Helpers of the mixers: projections, norms, convolutions, initializers, argument checks."""
