"""HGRN2, HGRN and LRN written out from its equations, one step at a time, for x [T, D]."""

import numpy as np

from tests.mixers.references.common import heads, sigmoid, silu


def hgrn2(params, x, *, num_heads):
  q, f, v = (
    x @ params[f"{name}_proj"]["kernel"] + params[f"{name}_proj"]["bias"] for name in "qfv"
  )
  gamma = 1 - np.exp(-(params["bound"] ** 2)) if "bound" in params else 0.0
  decay = heads(gamma + (1 - gamma) * sigmoid(f), num_heads)
  q, v = heads(sigmoid(q), num_heads), heads(silu(v), num_heads)
  y = np.zeros_like(v)
  for head in range(num_heads):
    S = np.zeros((q.shape[-1], v.shape[-1]))
    for t in range(len(x)):
      forget = decay[t, head]
      S = forget[:, None] * S + np.outer(1 - forget, v[t, head])
      y[t, head] = S.T @ q[t, head]
  y = y.reshape(len(x), -1)
  y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)
  y = y * params["norm"]["scale"] + params["norm"]["bias"]
  return y @ params["o_proj"]["kernel"] + params["o_proj"].get("bias", 0)


def hgrn(params, x):
  c, f, g = (
    x @ params[f"{name}_proj"]["kernel"] + params[f"{name}_proj"]["bias"] for name in "cfg"
  )
  D = f.shape[1]
  c = silu(c)
  gamma = 1 - np.exp(-(params["bound"] ** 2)) if "bound" in params else 0.0
  decay = gamma + (1 - gamma) * sigmoid(f)
  h, y = np.zeros(D, complex), []
  for t in range(len(x)):
    new = c[t, :D] + 1j * c[t, D:]
    h = decay[t] * np.exp(1j * params["theta"]) * h + (1 - decay[t]) * new
    y.append(np.concatenate([h.real, h.imag]))
  y = np.stack(y)
  y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)
  y = (y * params["norm"]["scale"] + params["norm"]["bias"]) * silu(g)
  return y @ params["o_proj"]["kernel"] + params["o_proj"].get("bias", 0)


def lrn(params, x, *, activation=np.tanh):
  f, i = (x @ params[f"{name}_proj"]["kernel"] + params[f"{name}_proj"]["bias"] for name in "fi")
  f, i = sigmoid(f), activation(i)
  h, y = 0.0, []
  for t in range(len(x)):
    h = f[t] * h + (1 - f[t]) * i[t]
    y.append(h)
  y = np.stack(y)
  if "g_proj" in params:
    y = y * sigmoid(x @ params["g_proj"]["kernel"] + params["g_proj"]["bias"])
  return y @ params["o_proj"]["kernel"]
