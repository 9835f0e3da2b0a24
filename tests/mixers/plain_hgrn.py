"""HGRN2 written out from its equations, one step at a time, for x [T, D]."""

import numpy as np

from tests.mixers.plain import heads, sigmoid, silu


def hgrn2(params, x, *, num_heads):
  q, f, v = (x @ params[f"{name}_proj"]["kernel"] + params[f"{name}_bias"] for name in "qfv")
  gamma = 1 - np.exp(-(params["bound"] ** 2)) if "bound" in params else 0.0
  decay = heads(gamma + (1 - gamma) * sigmoid(f), num_heads)
  q, v = heads(sigmoid(q), num_heads), heads(silu(v), num_heads)
  y = np.zeros_like(v)
  for head in range(num_heads):
    S = np.zeros((q.shape[-1], v.shape[-1]))
    for t in range(len(x)):
      forget = decay[t, head]
      S = forget[:, None] * S + np.outer(1 - forget, v[t, head])
      y[t, head] = S.T @ q[t, head]
  y = y.reshape(len(x), -1)
  y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)
  return (y * params["norm_gain"] + params["norm_bias"]) @ params["o_proj"]["kernel"]
