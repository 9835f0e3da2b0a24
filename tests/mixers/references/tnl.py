"""TransNormerLLM's mixer written out as sums over earlier steps, for x [T, D]."""

import numpy as np

from tests.mixers.references.common import heads, sigmoid, silu


def tnl(params, x, *, num_heads):
  q, k, v = (heads(x @ params[f"{name}_proj"]["kernel"], num_heads) for name in "qkv")
  q, k, v = silu(q), silu(k), v if "g_proj" in params else silu(v)
  theta = params.get("theta")
  theta = np.zeros(x.shape[1]) if theta is None else theta
  theta, rate = theta.reshape(num_heads, -1), np.exp(params["fixed_log_rate"])
  y = np.zeros_like(v)
  for h in range(num_heads):
    for t in range(len(x)):
      for s in range(t + 1):
        score = np.sum(q[t, h] * k[s, h] * np.cos((t - s) * theta[h]))
        y[t, h] += score * np.exp(-rate[h] * (t - s)) * v[s, h]
  y = y.reshape(len(x), -1)
  if "g_proj" in params:
    y = y / (np.sqrt(np.mean(y**2, axis=-1, keepdims=True)) + 1e-8)
    return (x @ params["g_proj"]["kernel"] * y) @ params["o_proj"]["kernel"]
  y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)
  y = y * params["norm"]["scale"] + params["norm"]["bias"]
  gate = sigmoid(x @ params["gate_down_proj"]["kernel"] @ params["gate_up_proj"]["kernel"])
  return (gate * y) @ params["o_proj"]["kernel"]
