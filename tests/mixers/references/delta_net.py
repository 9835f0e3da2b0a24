"""DeltaNet and Gated DeltaNet written out from their equations, one step at a time, x [T, D]."""

import numpy as np

from tests.mixers.references.common import (
  convolution,
  heads,
  root_mean_square_norm,
  sigmoid,
  silu,
  softplus,
)


def delta_net(params, x, *, num_heads):
  y = answers(params, x, num_heads, np.ones((len(x), num_heads)))
  return y @ params["o_proj"]["kernel"]


def gated_delta_net(params, x, *, num_heads):
  step = softplus(x @ params["a_proj"]["kernel"] + params["a_proj"]["bias"])
  y = answers(params, x, num_heads, np.exp(-np.exp(params["log_rate"]) * step))
  return (y * silu(x @ params["g_proj"]["kernel"])) @ params["o_proj"]["kernel"]


def answers(params, x, num_heads, decay):
  def stream(name):
    z = x @ params[f"{name}_proj"]["kernel"]
    return heads(silu(convolution(params[f"{name}_conv"], z)), num_heads)

  unit = lambda z: z / np.sqrt(np.sum(z**2, axis=-1, keepdims=True) + 1e-6)
  q, k, v = unit(stream("q")), unit(stream("k")), stream("v")
  beta = sigmoid(x @ params["b_proj"]["kernel"])
  K, y = q.shape[-1], np.zeros_like(v)
  for head in range(num_heads):
    S = np.zeros((K, v.shape[-1]))
    for t in range(len(x)):
      key = k[t, head]
      S = decay[t, head] * (np.eye(K) - beta[t, head] * np.outer(key, key)) @ S
      S = S + beta[t, head] * np.outer(key, v[t, head])
      y[t, head] = S.T @ q[t, head] / np.sqrt(K)
  return root_mean_square_norm(y, params["norm"]["scale"]).reshape(len(x), -1)
