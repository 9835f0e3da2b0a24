"""MetaLA written out from its equations, one step at a time, for x [T, D]."""

import numpy as np

from tests.mixers.references.common import convolution, heads, largest, sigmoid, silu


def metala(params, x, *, num_heads, selected_rows=None):
  u = silu(convolution(params["conv"], x)) if "conv" in params else x
  projected = lambda name: heads(u @ params[f"{name}_proj"]["kernel"], num_heads)
  q, v, a = projected("q"), projected("v"), sigmoid(projected("a")) ** (1 / 16)
  if selected_rows is not None:
    a = np.where(largest(1 - a, selected_rows), a, 1)
  own_weight = np.reshape(params["own_gain"], (num_heads, -1))
  y = np.zeros_like(v)
  for h in range(num_heads):
    S = np.zeros((q.shape[-1], v.shape[-1]))
    for t in range(len(x)):
      k = 1 - a[t, h]
      S = np.diag(a[t, h]) @ S + np.outer(k, v[t, h])
      own = q[t, h] @ (own_weight[h] * k)
      y[t, h] = S.T @ q[t, h] / np.sqrt(len(k)) + sigmoid(own * v[t, h])
  y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)
  gate = silu(u @ params["g_proj"]["kernel"] + params["g_proj"]["bias"])
  return (y.reshape(len(x), -1) * gate) @ params["o_proj"]["kernel"]
