"""Time mixers of RWKV written out from their equations, one step at a time, for x [T, D]."""

import numpy as np

from tests.mixers.references.common import heads, sigmoid, silu


def rwkv5(params, x, *, num_heads):
  before = np.concatenate([np.zeros((1, x.shape[1])), x[:-1]])

  def projected(name):
    mu = params[f"mu_{name}"]
    return (mu * x + (1 - mu) * before) @ params[f"{name}_proj"]["kernel"]

  r, k, v = (heads(projected(name), num_heads) for name in "rkv")
  # One number per channel, or one per head.
  decay, bonus = (
    np.reshape(p, (num_heads, -1)) for p in (np.exp(-np.exp(params["w"])), params["u"])
  )
  y = np.zeros_like(v)
  for head in range(num_heads):
    S = np.zeros((k.shape[-1], v.shape[-1]))
    for t in range(len(x)):
      kv = np.outer(k[t, head], v[t, head])
      y[t, head] = r[t, head] @ (S + bonus[head][:, None] * kv)
      S = decay[head][:, None] * S + kv
  y = y / 8
  y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)
  y = y.reshape(len(x), -1) * params["norm"]["scale"] + params["norm"]["bias"]
  return (y * silu(projected("g"))) @ params["o_proj"]["kernel"]


def rwkv4(params, x):
  """The sums themselves, in float64: the keys of a test are not so large as to overflow them."""
  before = np.concatenate([np.zeros((1, x.shape[1])), x[:-1]])

  def projected(name):
    mu = params[f"mu_{name}"]
    return (mu * x + (1 - mu) * before) @ params[f"{name}_proj"]["kernel"]

  r, k, v = (projected(name) for name in "rkv")
  y = np.zeros_like(v)
  for t in range(len(x)):
    lag = t - 1 - np.arange(t)[:, None]
    weights = np.exp(k[:t] - lag * np.exp(params["w"]))
    now = np.exp(params["u"] + k[t])
    y[t] = (np.sum(weights * v[:t], axis=0) + now * v[t]) / (np.sum(weights, axis=0) + now)
  return (sigmoid(r) * y) @ params["o_proj"]["kernel"]


def rwkv6(params, x, *, num_heads):
  before = np.concatenate([np.zeros((1, x.shape[1])), x[:-1]])
  step = before - x
  low = np.tanh((x + step * params["mu_x"]) @ params["mix_down_proj"]["kernel"])
  low = np.split(low, 5, axis=-1)
  stream = {
    name: x + step * (params[f"mu_{name}"] + low[i] @ params["mix_up"][i])
    for i, name in enumerate("wkvrg")
  }
  r, k, v = (heads(stream[name] @ params[f"{name}_proj"]["kernel"], num_heads) for name in "rkv")
  w = np.tanh(stream["w"] @ params["decay_down_proj"]["kernel"])
  w = params["w"] + w @ params["decay_up_proj"]["kernel"]
  decay, bonus = heads(np.exp(-np.exp(w)), num_heads), np.reshape(params["u"], (num_heads, -1))
  y = np.zeros_like(v)
  for head in range(num_heads):
    S = np.zeros((k.shape[-1], v.shape[-1]))
    for t in range(len(x)):
      kv = np.outer(k[t, head], v[t, head])
      y[t, head] = (S + np.diag(bonus[head]) @ kv).T @ r[t, head]
      S = np.diag(decay[t, head]) @ S + kv
  y = y - y.mean(-1, keepdims=True)
  y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 64e-5)
  y = y.reshape(len(x), -1) * params["norm"]["scale"] + params["norm"]["bias"]
  return (y * silu(stream["g"] @ params["g_proj"]["kernel"])) @ params["o_proj"]["kernel"]


def rwkv7(params, x, *, num_heads, first_values=None):
  """Written with S [V, K] and the published symbols: S (diag(w) - kk^T (kk * a)) + v^T k.

  `first_values` are those of the model's first layer.
  """
  before = np.concatenate([np.zeros((1, x.shape[1])), x[:-1]])
  stream = {name: x + (before - x) * params[f"mu_{name}"] for name in "rwkvag"}
  project = lambda name, layer: stream[name] @ params[f"{layer}_proj"]["kernel"]
  up = lambda z, layer: (
    z @ params[f"{layer}_up_proj"]["kernel"] + params[f"{layer}_up_proj"].get("bias", 0)
  )
  r, k, v = (project(name, name) for name in "rkv")
  if first_values is not None:
    v = v + (first_values - v) * sigmoid(up(project("v", "value_down"), "value"))
  w = np.exp(-np.exp(-0.5) * sigmoid(up(np.tanh(project("w", "decay_down")), "decay")))
  a = sigmoid(up(project("a", "rate_down"), "rate"))
  g = up(sigmoid(project("g", "gate_down")), "gate")
  kk = heads(k * params["erase_gain"], num_heads)
  kk = kk / np.sqrt(np.sum(kk**2, axis=-1, keepdims=True) + 1e-6)
  k = k * (1 + (a - 1) * params["rate_gain"])
  r, k, v, w, a = (heads(z, num_heads) for z in (r, k, v, w, a))
  y, K = np.zeros_like(v), r.shape[-1]
  for head in range(num_heads):
    S = np.zeros((K, K))
    for t in range(len(x)):
      unit, key = kk[t, head], k[t, head]
      S = S @ (np.diag(w[t, head]) - np.outer(unit, unit * a[t, head])) + np.outer(v[t, head], key)
      y[t, head] = S @ r[t, head]
  y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + K * 1e-5)
  y = y.reshape(len(x), -1) * params["norm"]["scale"] + params["norm"]["bias"]
  bonus = np.sum(r * k * heads(params["bonus_gain"][None], num_heads), axis=-1, keepdims=True) * v
  return ((y + bonus.reshape(len(x), -1)) * g) @ params["o_proj"]["kernel"]
