"""Norms over the last axis, with what stands before and after them in a model."""
