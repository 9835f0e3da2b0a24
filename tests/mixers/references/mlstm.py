"""mLSTM, token by token, with the stabilizer of the paper."""

import numpy as np

from tests.mixers.references.common import heads, sigmoid, softplus


def mlstm(params, x, *, num_heads, gate_soft_cap=15.0, denominator_eps=1e-6, norm_eps=1e-6):
  linear = lambda name: x @ params[name]["kernel"] + params[name].get("bias", 0)
  capped = lambda z: z if gate_soft_cap is None else gate_soft_cap * np.tanh(z / gate_soft_cap)
  q, k, v = (heads(linear(f"{name}_proj"), num_heads) for name in "qkv")
  q = q / np.sqrt(q.shape[-1])
  log_i, log_f = capped(linear("i_proj")), -softplus(-capped(linear("f_proj")))
  C, n, m = np.zeros((*k.shape[1:], v.shape[-1])), np.zeros(k.shape[1:]), np.zeros(num_heads)
  h = np.zeros_like(v)
  for t in range(len(x)):
    before, m = m, np.maximum(log_f[t] + m, log_i[t])
    f, i = np.exp(log_f[t] + before - m)[:, None], np.exp(log_i[t] - m)[:, None]
    C = f[..., None] * C + (i * k[t])[..., None] * v[t][:, None]
    n = f * n + i * k[t]
    size = np.maximum(np.abs(np.sum(n * q[t], axis=-1)), np.exp(-m)) + denominator_eps
    h[t] = np.einsum("hkv,hk->hv", C, q[t]) / size[:, None]
  h = h - h.mean(-1, keepdims=True)
  h = (h / np.sqrt(np.mean(h**2, axis=-1, keepdims=True) + norm_eps)).reshape(len(x), -1)
  h = h * params["norm"]["scale"] + params["norm"].get("bias", 0)
  y = (sigmoid(linear("g_proj")) * h) @ params["o_proj"]["kernel"]
  return y + params["o_proj"].get("bias", 0)
