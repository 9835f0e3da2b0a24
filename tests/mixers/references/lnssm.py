"""The LNSSM mixer from its equations, as sums over pairs of tokens.

In NumPy it is the reference of values; in `jax.numpy` under x64 its derivatives are that of the
gradients.
"""

import numpy as np


def lnssm(
  params,
  x,
  *,
  num_heads,
  shift="qkvg",
  decay_first=True,
  feature_map="exp",
  use_decay=True,
  use_gate=True,
  norm="before",
  xp=np,
):
  """The output [T, D] for one sequence x [T, D]; `params` as in the module's pure dictionary."""
  T, D = x.shape
  before = xp.concatenate([xp.zeros((1, D)), x[:-1]])

  def stream(name):
    if shift == "none" or name not in shift:
      return x
    mu = params[f"mu_{name}"]
    return mu * x + (1 - mu) * before

  def normed(z):
    root_mean_square = xp.sqrt(xp.sum(z**2, axis=-1, keepdims=True) / D)
    return params["gamma"] * z / (root_mean_square + 1e-8)

  def features(z):
    z = normed(z) if norm == "before" else z
    if feature_map != "identity":
      z = xp.exp(z) if feature_map == "exp" else xp.where(z > 0, z + 1, xp.exp(z))
    return normed(z) if norm == "after" else z

  project = lambda name: stream(name) @ params[f"{name}_proj"]["kernel"]
  phi_q, phi_k, v = features(project("q")), features(project("k")), project("v")

  lag = np.arange(T)[:, None] - np.arange(T)[None, :]
  power = lag if decay_first else np.maximum(lag - 1, 0)
  decay = xp.exp(-xp.exp(params["w"])) if use_decay else xp.ones(D)  # [D]
  weight = (lag >= 0)[..., None] * decay ** np.maximum(power, 0)[..., None]  # [T, T, D]

  K = D // num_heads
  outputs = []
  for head in range(num_heads):
    i = slice(head * K, (head + 1) * K)
    scores = xp.einsum("ti,ji,tji->tj", phi_q[:, i], phi_k[:, i], weight[..., i])
    normalizer = K**0.5 if feature_map == "identity" else scores.sum(axis=-1, keepdims=True)
    outputs.append(scores @ v[:, i] / normalizer)
  y = xp.concatenate(outputs, axis=-1)
  y = y / (1 + xp.exp(-project("g"))) if use_gate else y
  return y @ params["o_proj"]["kernel"]
