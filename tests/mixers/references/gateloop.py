"""GateLoop written out from its equations, one step at a time, for x [T, D]."""

import numpy as np

from tests.mixers.references.common import heads, root_mean_square_norm, sigmoid, silu


def gateloop(params, x, *, num_heads):
  of = lambda name: x @ params[f"{name}_proj"]["kernel"]
  q, k, v = (heads(of(name), num_heads) for name in "qkv")
  decay = sigmoid(of("a") + params["a_proj"]["bias"]) * np.exp(
    1j * (of("p") + params["p_proj"]["bias"])
  )
  decay = heads(decay, num_heads)
  y = np.zeros_like(v)
  for head in range(num_heads):
    S = np.zeros((k.shape[-1], v.shape[-1]), complex)
    for t in range(len(x)):
      S = decay[t, head][:, None] * S + np.outer(k[t, head], v[t, head])
      y[t, head] = (S.T @ q[t, head]).real
  y = root_mean_square_norm(y.reshape(len(x), -1), params["norm"]["scale"])
  return (y * silu(of("g"))) @ params["o_proj"]["kernel"]
