"""Gated slot attention written out from its equations, one step at a time, for x [T, D]."""

import numpy as np

from tests.mixers.references.common import heads, largest, root_mean_square_norm, sigmoid, silu


def gsa(params, x, *, num_heads, gate_logit_normalizer=8, scale=1, selected_rows=None):
  projected = lambda name: heads(x @ params[f"{name}_proj"]["kernel"], num_heads)
  q, k, v = (silu(projected(name)) for name in "qkv")
  f = sigmoid(projected("f")) ** (1 / gate_logit_normalizer)
  if selected_rows is not None:
    f = np.where(largest(1 - f, selected_rows), f, 1)
  y = np.zeros_like(v)
  for h in range(num_heads):
    keys, values = np.zeros((f.shape[-1], k.shape[-1])), np.zeros((f.shape[-1], v.shape[-1]))
    for t in range(len(x)):
      keep = f[t, h][:, None]
      keys = keep * keys + (1 - keep) * k[t, h]
      values = keep * values + (1 - keep) * v[t, h]
      weights = np.exp(scale * keys @ q[t, h])
      y[t, h] = values.T @ (weights / weights.sum())
  y = root_mean_square_norm(silu(y.reshape(len(x), -1)), params["norm"]["scale"])
  return y @ params["o_proj"]["kernel"]
