"""Gated fast weights written out from their equations, one step at a time, for x [T, D]."""

import numpy as np

from tests.mixers.references.common import heads, sigmoid
from tests.mixers.references.positional_attention import layer_norm


def gfw(params, x, *, num_heads, gate_logit_normalizer=16):
  projected = lambda name: heads(x @ params[f"{name}_proj"]["kernel"], num_heads)
  q, k, v = projected("q"), projected("k"), projected("v")
  a, c = (sigmoid(projected(name)) ** (1 / gate_logit_normalizer) for name in "ac")
  y = np.zeros_like(v)
  for h in range(num_heads):
    S = np.zeros((k.shape[-1], v.shape[-1]))
    for t in range(len(x)):
      S = np.outer(a[t, h], c[t, h]) * S + np.outer(k[t, h], v[t, h])
      y[t, h] = S.T @ q[t, h]
  return layer_norm(params, y) @ params["o_proj"]["kernel"]
