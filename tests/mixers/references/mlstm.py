"""mLSTM, token by token, with the stabilizer of the paper."""

import numpy as np

from tests.mixers.references.common import convolution, heads, sigmoid, silu, softplus


def blocks(params, x):
  """Square blocks of channels: kernel [blocks, E / blocks, E / blocks]."""
  y = np.einsum("tbi,bij->tbj", heads(x, len(params["kernel"])), params["kernel"])
  return y.reshape(x.shape) + params.get("bias", 0)


def mlstm(params, x, *, num_heads, gate_soft_cap=15.0, denominator_eps=1e-6, norm_eps=1e-6):
  affine = lambda name, z: z @ params[name]["kernel"] + params[name].get("bias", 0)
  linear = lambda name: affine(name, x)
  capped = lambda z: z if gate_soft_cap is None else gate_soft_cap * np.tanh(z / gate_soft_cap)
  if "in_proj" in params:
    u, z = np.split(linear("in_proj"), 2, axis=1)
    c = silu(convolution(params["conv"], u))
    streams = [
      blocks(params[f"{name}_blocks"], z) for name, z in zip("qkv", (c, c, u), strict=True)
    ]
    gates = np.concatenate(streams, axis=1)
  else:
    streams, gates = [linear(f"{name}_proj") for name in "qkv"], x
  q, k, v = (heads(stream, num_heads) for stream in streams)
  q = q / np.sqrt(q.shape[-1])
  log_i, log_f = capped(affine("i_proj", gates)), -softplus(-capped(affine("f_proj", gates)))
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
  if "in_proj" in params:
    return affine("o_proj", (h + params["skip"] * c) * silu(z))
  return affine("o_proj", sigmoid(linear("g_proj")) * h)
