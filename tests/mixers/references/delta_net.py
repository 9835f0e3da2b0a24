"""Mixers of the delta rule written out from their equations, one step at a time, x [T, D]."""

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
  q, k, v = (stream(params, x, name, num_heads) for name in "qkv")
  q, k = unit(q), unit(k)
  beta = sigmoid(x @ params["b_proj"]["kernel"])
  write = beta[..., None] * v
  y = memory(q, decay[..., None] * np.ones_like(k), (beta[..., None] * k, k), (k, write))
  return root_mean_square_norm(y, params["norm"]["scale"]).reshape(len(x), -1)


def kda(params, x, *, num_heads):
  q, k = (unit(stream(params, x, name, num_heads)) for name in "qk")
  v = stream(params, x, "v", num_heads)
  beta = sigmoid(x @ params["b_proj"]["kernel"])[..., None]
  f, rate = decay_logits(params, x, num_heads)
  y = memory(q, np.exp(-rate * softplus(f)), (beta * k, k), (k, beta * v))
  return low_rank_output(params, x, y)


def gated_delta_net2(params, x, *, num_heads):
  q, k = (unit(stream(params, x, name, num_heads)) for name in "qk")
  v = stream(params, x, "v", num_heads)
  gate = lambda name: heads(sigmoid(x @ params[f"{name}_proj"]["kernel"]), num_heads)
  b, w = gate("erase"), gate("write")
  f, rate = decay_logits(params, x, num_heads)
  y = memory(q, np.exp(-rate * softplus(f)), (k, b * k), (k, w * v))
  return low_rank_output(params, x, y)


def comba(params, x, *, num_heads):
  q, k, v = (stream(params, x, name, num_heads) for name in "qkv")
  p = sigmoid(params["inner_gain"])[:, None] * k
  q, k, p = unit(q - params["correction_gain"][:, None] * p), unit(k), unit(p)
  beta = sigmoid(x @ params["b_proj"]["kernel"])[..., None]
  step = softplus(x @ params["a_proj"]["kernel"] + params["a_proj"]["bias"])
  decay = np.exp(-np.exp(params["log_rate"]) * step)[..., None] * np.ones_like(k)
  y = memory(q, decay, (beta * k, p), (k, beta * v), erase_first=True)
  y = root_mean_square_norm(y, params["norm"]["scale"]).reshape(len(x), -1)
  if "g_proj" in params:
    y = y * sigmoid(x @ params["g_proj"]["kernel"])
  return y @ params["o_proj"]["kernel"]


def delta_product(params, x, *, num_heads, steps=2, largest=2.0):
  q = unit(stream(params, x, "q", num_heads))
  k, v = (stream(params, x, name, steps * num_heads) for name in "kv")
  k, v = unit(k), v
  beta = largest * sigmoid(x @ params["b_proj"]["kernel"])
  decay = np.ones((len(x), num_heads))
  if "a_proj" in params:
    step = softplus(x @ params["a_proj"]["kernel"] + params["a_proj"]["bias"])
    decay = np.exp(-np.exp(params["log_rate"]) * step)
  y, K = np.zeros((len(x), num_heads, v.shape[-1])), q.shape[-1]
  for head in range(num_heads):
    S = np.zeros((K, v.shape[-1]))
    for t in range(len(x)):
      S = decay[t, head] * S
      for place in range(head, steps * num_heads, num_heads):
        key, rate = k[t, place], beta[t, place]
        S = S + rate * np.outer(key, v[t, place] - S.T @ key)
      y[t, head] = S.T @ q[t, head] / np.sqrt(K)
  y = root_mean_square_norm(y, params["norm"]["scale"]).reshape(len(x), -1)
  if "g_proj" in params:
    y = y * silu(x @ params["g_proj"]["kernel"])
  return y @ params["o_proj"]["kernel"]


def stream(params, x, name, num_heads):
  z = x @ params[f"{name}_proj"]["kernel"]
  return heads(silu(convolution(params[f"{name}_conv"], z)), num_heads)


def unit(z):
  return z / np.sqrt(np.sum(z**2, axis=-1, keepdims=True) + 1e-6)


def memory(q, decay, erase, write, *, erase_first=False):
  """K^(-1/2) S_t^T q_t of S_t = (I - e_t f_t^T) diag(a_t) S_{t-1} + w_t u_t^T, each [T, H, K or V].

  `erase` is (e, f), `write` is (w, u). With `erase_first`, f reads S_{t-1} before it decays.
  """
  T, H, K = q.shape
  y = np.zeros_like(write[1])
  for head in range(H):
    e, f, w, u = (z[:, head] for z in (*erase, *write))
    S = np.zeros((K, u.shape[-1]))
    for t in range(T):
      decayed = decay[t, head][:, None] * S
      old = f[t] @ (S if erase_first else decayed)
      S = decayed - np.outer(e[t], old) + np.outer(w[t], u[t])
      y[t, head] = S.T @ q[t, head] / np.sqrt(K)
  return y


def decay_logits(params, x, num_heads):
  f = x @ params["decay_down_proj"]["kernel"] @ params["decay_up_proj"]["kernel"]
  return heads(f + params["decay_up_proj"]["bias"], num_heads), np.exp(params["log_rate"])[:, None]


def low_rank_output(params, x, y):
  y = root_mean_square_norm(y, params["norm"]["scale"]).reshape(len(x), -1)
  gate = x @ params["gate_down_proj"]["kernel"] @ params["gate_up_proj"]["kernel"]
  return (y * sigmoid(gate + params["gate_up_proj"]["bias"])) @ params["o_proj"]["kernel"]
