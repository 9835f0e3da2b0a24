"""Longhorn written out from its equations, one step at a time, for x [T, D]."""

import numpy as np

from tests.mixers.references.common import convolution, sigmoid, silu


def longhorn(params, u):
  def step(S, x, beta, k):
    rate = beta / (1 + beta * (k @ k))
    return (1 - np.outer(rate, k**2)) * S + np.outer(rate * x, k)

  return block(params, u, step)


def longhorn_exact(params, u):
  """Each step solves for the minimum of ||s - S_i||^2 + beta_i (s . k - x_i)^2, channel by channel:
  (I + beta k k^T) s = S_i + beta x_i k."""

  def step(S, x, beta, k):
    outer = np.outer(k, k)
    rows = [
      np.linalg.solve(np.eye(len(k)) + beta[i] * outer, S[i] + beta[i] * x[i] * k)
      for i in range(len(x))
    ]
    return np.stack(rows)

  return block(params, u, step)


def block(params, u, step):
  rank, D = params["beta_proj"]["kernel"].shape
  N = (params["x_proj"]["kernel"].shape[1] - rank) // 2
  projected = u @ params["in_proj"]["kernel"]
  x, z = projected[:, :D], projected[:, D:]
  x = silu(convolution(params["conv"], x))
  projected = x @ params["x_proj"]["kernel"]
  delta, k, q = projected[:, :rank], projected[:, rank : rank + N], projected[:, rank + N :]
  beta = sigmoid(delta @ params["beta_proj"]["kernel"] + params["beta_proj"]["bias"])

  S, y = np.zeros((D, N)), np.zeros_like(x)
  for t in range(len(u)):
    S = step(S, x[t], beta[t], k[t])
    y[t] = S @ q[t] + params["skip"] * x[t]
  return (y * silu(z)) @ params["o_proj"]["kernel"]
