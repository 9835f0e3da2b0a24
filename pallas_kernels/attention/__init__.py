"""Softmax attention in which each query sees one range of keys."""
