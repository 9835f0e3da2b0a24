"""GLA and RetNet written out from their equations, one step at a time, for x [T, D]."""

import numpy as np

from tests.mixers.references.common import heads, largest, root_mean_square_norm, sigmoid, silu


def gla(params, x, *, num_heads, selected_rows=None):
  gate = x @ params["decay_down_proj"]["kernel"] @ params["decay_up_proj"]["kernel"]
  decay = heads(sigmoid(gate + params["decay_up_proj"]["bias"]) ** (1 / 16), num_heads)
  q, k, v = (heads(x @ params[f"{name}_proj"]["kernel"], num_heads) for name in "qkv")
  if selected_rows is not None:
    chosen = largest(k, selected_rows)
    k = np.where(chosen, np.exp(k), 0)
    k, decay = k / k.sum(-1, keepdims=True), np.where(chosen, decay, 1)
  return gated_output(params, x, recurrence(q, k, v, decay))


def retnet(params, x, *, num_heads):
  q, k, v = (heads(x @ params[f"{name}_proj"]["kernel"], num_heads) for name in "qkv")
  q, k = (rotate(z) for z in (q, k))
  decay = np.broadcast_to(1 - 2.0 ** (-5 - np.arange(num_heads))[:, None], k.shape)
  return gated_output(params, x, recurrence(q, k, v, decay))


def recurrence(q, k, v, decay):
  """y_t = K^(-1/2) S_t^T q_t with S_t = diag(a_t) S_{t-1} + k_t v_t^T, for each head."""
  T, H, K = q.shape
  y = np.zeros_like(v)
  for head in range(H):
    S = np.zeros((K, v.shape[-1]))
    for t in range(T):
      S = decay[t, head][:, None] * S + np.outer(k[t, head], v[t, head])
      y[t, head] = S.T @ q[t, head] / np.sqrt(K)
  return y


def rotate(x):
  """Channels i and i + K / 2 are a complex number, turned by the angle t 10000^(-2 i / K)."""
  T, _, K = x.shape
  angle = np.arange(T)[:, None] * 10000.0 ** (-2 * np.arange(K // 2) / K)
  turned = (x[..., : K // 2] + 1j * x[..., K // 2 :]) * np.exp(1j * angle)[:, None]
  return np.concatenate([turned.real, turned.imag], axis=-1)


def gated_output(params, x, y):
  if "norm" in params:
    y = root_mean_square_norm(y, params["norm"]["scale"])
  else:  # a LayerNorm without parameters
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)
  gate = silu(x @ params["g_proj"]["kernel"] + params["g_proj"].get("bias", 0))
  return (y.reshape(len(x), -1) * gate) @ params["o_proj"]["kernel"]
