"""Softmax attention on every NVIDIA GPU since Ampere."""
