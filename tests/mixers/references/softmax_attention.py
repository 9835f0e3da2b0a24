"""Softmax attention written out from its equation, one step at a time, for x [T, D]."""

import numpy as np

from tests.mixers.references.common import heads


def softmax_attention(params, x, *, num_heads, num_kv_heads=None, window=None, rotary=True):
  num_kv_heads = num_kv_heads or num_heads
  affine = lambda name: x @ params[f"{name}_proj"]["kernel"] + params[f"{name}_proj"].get("bias", 0)
  q, k, v = (
    heads(affine("q"), num_heads),
    heads(affine("k"), num_kv_heads),
    heads(affine("v"), num_kv_heads),
  )
  T, H, K = q.shape
  if rotary:
    q, k = rotated(q), rotated(k)
  y = np.zeros((T, H, v.shape[-1]))
  for t in range(T):
    first = 0 if window is None else max(0, t - window + 1)
    for h in range(H):
      g = h // (H // num_kv_heads)
      weights = np.exp(k[first : t + 1, g] @ q[t, h] / np.sqrt(K))
      y[t, h] = weights @ v[first : t + 1, g] / weights.sum()
  y = y.reshape(T, -1)
  if "g_proj" in params:
    y = y / (1 + np.exp(-affine("g")))
  return y @ params["o_proj"]["kernel"] + params["o_proj"].get("bias", 0)


def rotated(x):
  """Channels i and i + K / 2 of step t turned by the angle t 10000^(-2 i / K)."""
  T, _, K = x.shape
  a = (np.arange(T)[:, None] / 10000.0 ** (2 * np.arange(K // 2) / K))[:, None]
  first, second = x[..., : K // 2], x[..., K // 2 :]
  pair = (first * np.cos(a) - second * np.sin(a), first * np.sin(a) + second * np.cos(a))
  return np.concatenate(pair, axis=-1)
