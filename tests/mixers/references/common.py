"""Pieces that the plain transcriptions share. NumPy, float64, one sequence x [T, D]."""

import numpy as np


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def silu(x):
  return x * sigmoid(x)


def softplus(x):
  return np.logaddexp(0, x)


def convolution(params, x):
  """Causal, depthwise: kernel [W, D], whose last row is for the current token."""
  width = len(params["kernel"])
  padded = np.concatenate([np.zeros((width - 1, x.shape[1])), x])
  y = np.stack([np.sum(params["kernel"] * padded[t : t + width], axis=0) for t in range(len(x))])
  return y + params.get("bias", 0)


def root_mean_square_norm(x, gain, eps=1e-5):
  return gain * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)


def heads(x, num_heads):
  """[T, D] -> [T, H, D / H]."""
  return x.reshape(len(x), num_heads, -1)


def largest(scores, count):
  """Whether a score is one of the largest of its row, [..., K]."""
  return np.argsort(np.argsort(-scores, axis=-1), axis=-1) < count
