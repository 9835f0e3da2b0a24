"""LLN attention written out as sums over earlier steps, for x [T, D]."""

import numpy as np

from tests.mixers.references.kernel_attention import output, projected


def lln(params, x, *, num_heads, matching="running"):
  q, k, v = projected(params, x, num_heads)
  T, H, K = q.shape
  y, near = np.zeros_like(v), np.zeros_like(v)
  alpha, beta = np.ones(T), np.ones(T)
  if matching == "running":
    for t in range(T):
      sigma_q, sigma_k = np.std(q[: t + 1]), np.std(k[: t + 1])
      square = (sigma_q**2 * sigma_k**2 + 0.35487039130661086) / (2 * 0.14855178144710912)
      alpha[t], beta[t] = np.sqrt(square) / sigma_q, np.sqrt(square) / sigma_k
  for t in range(T):
    first = t // K * K  # of t's block
    for h in range(H):
      features = np.exp(beta[: t + 1, None] * k[: t + 1, h])
      weights = features @ np.exp(alpha[t] * q[t, h])
      y[t, h] = weights @ v[: t + 1, h] / weights.sum()
      weights = np.exp(k[first : t + 1, h] @ q[t, h] / np.sqrt(K))
      near[t, h] = weights @ v[first : t + 1, h] / weights.sum()
  r = np.reshape(params["lln_gain"], (H, K)) if params.get("lln_gain") is not None else 0.5
  p = np.reshape(params["block_gain"], (H, K)) if params.get("block_gain") is not None else 1 - r
  return output(params, r * y + p * near)
