"""Mamba, Mamba-2, S6 and SSD written out from their equations, one step at a time, x [T, D]."""

import numpy as np

from tests.mixers.references.common import (
  convolution,
  root_mean_square_norm,
  sigmoid,
  silu,
  softplus,
)


def mamba(params, u):
  D, N = params["a_log"].shape
  rank = params["dt_proj"]["kernel"].shape[0]
  projected = u @ params["in_proj"]["kernel"]
  x, z = projected[:, :D], projected[:, D:]
  x = silu(convolution(params["conv"], x))
  projected = x @ params["x_proj"]["kernel"]
  delta, B, C = projected[:, :rank], projected[:, rank : rank + N], projected[:, rank + N :]
  step = softplus(delta @ params["dt_proj"]["kernel"] + params["dt_proj"]["bias"])
  A = -np.exp(params["a_log"])

  h, y = np.zeros((D, N)), np.zeros_like(x)
  for t in range(len(u)):
    for i in range(D):
      h[i] = np.exp(step[t, i] * A[i]) * h[i] + step[t, i] * x[t, i] * B[t]
      y[t, i] = h[i] @ C[t] + params["skip"][i] * x[t, i]
  return (y * silu(z)) @ params["o_proj"]["kernel"]


def mamba2(params, u, *, head_dim):
  D, H = params["o_proj"]["kernel"].shape[0], len(params["dt_bias"])
  N = (params["conv"]["kernel"].shape[1] - D) // 2
  projected = u @ params["in_proj"]["kernel"]
  z, xBC, dt = projected[:, :D], projected[:, D : 2 * D + 2 * N], projected[:, 2 * D + 2 * N :]
  xBC = silu(convolution(params["conv"], xBC))
  x, B, C = xBC[:, :D], xBC[:, D : D + N], xBC[:, D + N :]
  step = softplus(dt + params["dt_bias"])
  A = -np.exp(params["log_rate"])

  y = np.zeros_like(x)
  for head in range(H):
    S, i = np.zeros((N, head_dim)), slice(head * head_dim, (head + 1) * head_dim)
    for t in range(len(u)):
      S = np.exp(step[t, head] * A[head]) * S + np.outer(B[t], step[t, head] * x[t, i])
      y[t, i] = S.T @ C[t] + params["skip"][head] * x[t, i]
  gated = y * z * sigmoid(z)
  return root_mean_square_norm(gated, params["norm"]["scale"]) @ params["o_proj"]["kernel"]


def s6(params, u):
  rank = params["dt_proj"]["kernel"].shape[0]
  r = (u @ params["x_proj"]["kernel"])[:, :rank]
  step = softplus(r @ params["dt_proj"]["kernel"] + params["dt_proj"]["bias"])
  return selective(params, u, step, np.exp(params["a_log"]))


def ssd(params, u):
  r = (u @ params["x_proj"]["kernel"])[:, :1]
  N = (params["x_proj"]["kernel"].shape[1] - 1) // 2
  rates = np.full((u.shape[1], N), np.exp(params["log_rate"][0]))
  return selective(params, u, softplus(r + params["dt_bias"]), rates)


def selective(params, u, step, rates):
  """The recurrence on the layer's input, and W_o, with keys and queries from the end of W_x u."""
  D, N = rates.shape
  projected = u @ params["x_proj"]["kernel"]
  B, C = projected[:, -2 * N : -N], projected[:, -N:]
  h, y = np.zeros((D, N)), np.zeros_like(u)
  for t in range(len(u)):
    for i in range(D):
      h[i] = np.exp(-step[t, i] * rates[i]) * h[i] + step[t, i] * u[t, i] * B[t]
      y[t, i] = h[i] @ C[t] + params["skip"][i] * u[t, i]
  return y @ params["o_proj"]["kernel"]
