"""Softmax attention written out from its equation, one step at a time, for x [T, D]."""

import numpy as np

from tests.mixers.references.common import heads, root_mean_square_norm


def softmax_attention(params, x, *, num_heads, num_kv_heads=None, window=None, rotary=True):
  num_kv_heads = num_kv_heads or num_heads
  affine = lambda name: x @ params[f"{name}_proj"]["kernel"] + params[f"{name}_proj"].get("bias", 0)
  q, k, v = (
    heads(affine("q"), num_heads),
    heads(affine("k"), num_kv_heads),
    heads(affine("v"), num_kv_heads),
  )
  if rotary:
    q, k = rotated(q), rotated(k)
  y = read(q, k, v, window, params.get("sinks"))
  if "g_proj" in params:
    y = y / (1 + np.exp(-affine("g")))
  return y @ params["o_proj"]["kernel"] + params["o_proj"].get("bias", 0)


def latent_attention(params, x, *, num_heads, rotary_width, window=None, rotary=True):
  """Keys and values of all heads from one vector per token."""
  inner = params["latents"]
  affine = lambda z, name: z @ inner[name]["kernel"] + inner[name].get("bias", 0)
  norm = lambda z, name: root_mean_square_norm(z, inner[name]["scale"], 1e-6)
  shared, c = np.split(affine(x, "kv_down_proj"), [rotary_width], axis=1)
  c = norm(c, "kv_norm")
  if "q_down_proj" in inner:
    q = affine(norm(affine(x, "q_down_proj"), "q_norm"), "q_up_proj")
  else:
    q = x @ params["q_proj"]["kernel"]
  q, shared = heads(q, num_heads), shared[:, None]
  if rotary:
    turned = rotated(q[..., :rotary_width])
    q, shared = np.concatenate([turned, q[..., rotary_width:]], axis=-1), rotated(shared)
  k, v = (heads(affine(c, f"{name}_up_proj"), num_heads) for name in "kv")
  k = np.concatenate([np.broadcast_to(shared, (*k.shape[:2], rotary_width)), k], axis=-1)
  return read(q, k, v, window) @ params["o_proj"]["kernel"] + params["o_proj"].get("bias", 0)


def read(q, k, v, window, sinks=None):
  """[T, H V] of queries [T, H, K]."""
  (T, H, K), num_kv_heads = q.shape, k.shape[1]
  y = np.zeros((T, H, v.shape[-1]))
  for t in range(T):
    first = 0 if window is None else max(0, t - window + 1)
    for h in range(H):
      g = h // (H // num_kv_heads)
      weights = np.exp(k[first : t + 1, g] @ q[t, h] / np.sqrt(K))
      y[t, h] = (
        weights @ v[first : t + 1, g] / (weights.sum() + (0 if sinks is None else np.exp(sinks[h])))
      )
  return y.reshape(T, -1)


def rotated(x):
  """Channels i and i + K / 2 of step t turned by the angle t 10000^(-2 i / K)."""
  T, _, K = x.shape
  a = (np.arange(T)[:, None] / 10000.0 ** (2 * np.arange(K // 2) / K))[:, None]
  first, second = x[..., : K // 2], x[..., K // 2 :]
  pair = (first * np.cos(a) - second * np.sin(a), first * np.sin(a) + second * np.cos(a))
  return np.concatenate(pair, axis=-1)
