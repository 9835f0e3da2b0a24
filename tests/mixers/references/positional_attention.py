"""cosFormer and LRPE written out as sums over earlier steps, for x [T, D]."""

import numpy as np

from tests.mixers.references.kernel_attention import output, projected


def cosformer(params, x, *, num_heads, max_length):
  q, k, v = projected(params, x, num_heads)
  y = np.zeros_like(v)
  for t in range(len(x)):
    cosine = np.cos(np.pi * (t - np.arange(t + 1)) / (2 * max_length))
    for h in range(num_heads):
      weights = cosine * (np.maximum(k[: t + 1, h], 0) @ np.maximum(q[t, h], 0))
      y[t, h] = weights @ v[: t + 1, h] / max(weights.sum(), 1e-6)
  return output(params, y)


def lrpe(params, x, *, num_heads):
  q, k, v = projected(params, x, num_heads)
  theta = np.reshape(params["theta"], (num_heads, -1))
  y = np.zeros_like(v)
  for t in range(len(x)):
    lag = (t - np.arange(t + 1))[:, None]
    for h in range(num_heads):
      y[t, h] = (k[: t + 1, h] * np.cos(lag * theta[h]) @ q[t, h]) @ v[: t + 1, h]
  return output(params, layer_norm(params, y))


def layer_norm(params, y):
  """Over all D channels of y [T, H, V]."""
  y = y.reshape(len(y), -1)
  y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)
  return y * params["norm"]["scale"] + params["norm"]["bias"]
