"""Attention by feature maps, written out from the equations as sums over earlier steps."""

import numpy as np

from tests.mixers.references.common import heads, sigmoid


def linear_attention(params, x, *, num_heads, feature_map="elu"):
  q, k, v = projected(params, x, num_heads)
  if feature_map == "identity":
    return output(params, mixed(q, k, v, lambda q, k: k @ q))
  phi = lambda z: np.where(z > 0, z + 1, np.exp(np.minimum(z, 0)))
  return output(params, weighted_mean(q, k, v, lambda q, k: phi(k) @ phi(q)))


def normalized_attention(params, x, *, num_heads, eta="exp"):
  q, k, v = projected(params, x, num_heads)
  z = x @ params["eta_proj"]["kernel"] + params["eta_proj"].get("bias", 0)
  eta = {"exp": np.exp, "softplus": lambda z: np.log(1 + np.exp(z)), "sigmoid": sigmoid}[eta](z)
  return output(params, mixed(q, k, v, lambda q, k: k @ q) / eta[..., None])


def based(params, x, *, num_heads):
  q, k, v = projected(params, x, num_heads)

  def weights(q, k):
    score = k @ q / np.sqrt(len(q))
    return 1 + score + score**2 / 2

  return output(params, weighted_mean(q, k, v, weights))


def projected(params, x, num_heads):
  affine = lambda name: x @ params[f"{name}_proj"]["kernel"] + params[f"{name}_proj"].get("bias", 0)
  return tuple(heads(affine(name), num_heads) for name in "qkv")


def output(params, y):
  return y.reshape(len(y), -1) @ params["o_proj"]["kernel"] + params["o_proj"].get("bias", 0)


def mixed(q, k, v, weights):
  """y_t = sum_j w_tj v_j, where weights(q_t [K], k [t + 1, K]) gives w_t."""
  T, H, _ = q.shape
  y = np.zeros((T, H, v.shape[-1]))
  for t in range(T):
    for h in range(H):
      y[t, h] = weights(q[t, h], k[: t + 1, h]) @ v[: t + 1, h]
  return y


def weighted_mean(q, k, v, weights):
  return mixed(q, k, v, weights) / mixed(q, k, np.ones_like(v), weights)
