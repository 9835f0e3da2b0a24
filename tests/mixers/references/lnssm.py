"""The LNSSM mixer from its equations, as sums over pairs of tokens.

In NumPy it is the reference of values; in `jax.numpy` under x64 its derivatives are that of the
gradients.
"""

import numpy as np


def lnssm(params, x, *, num_heads, shift="qkvg", decay_first=True, xp=np):
  """The output [T, D] for one sequence x [T, D]; `params` as in the module's pure dictionary."""
  T, D = x.shape
  before = xp.concatenate([xp.zeros((1, D)), x[:-1]])

  def stream(name):
    if name == "q" and shift == "kvg":
      return x
    mu = params[f"mu_{name}"]
    return mu * x + (1 - mu) * before

  def norm(z):
    root_mean_square = xp.sqrt(xp.sum(z**2, axis=-1, keepdims=True) / D)
    return params["gamma"] * z / (root_mean_square + 1e-8)

  q, k, v, g = (stream(name) @ params[f"{name}_proj"]["kernel"] for name in "qkvg")
  phi_q, phi_k = xp.exp(norm(q)), xp.exp(norm(k))

  lag = np.arange(T)[:, None] - np.arange(T)[None, :]
  power = lag if decay_first else np.maximum(lag - 1, 0)
  decay = xp.exp(-xp.exp(params["w"]))  # [D]
  weight = (lag >= 0)[..., None] * decay ** np.maximum(power, 0)[..., None]  # [T, T, D]

  K = D // num_heads
  outputs = []
  for head in range(num_heads):
    i = slice(head * K, (head + 1) * K)
    scores = xp.einsum("ti,ji,tji->tj", phi_q[:, i], phi_k[:, i], weight[..., i])
    outputs.append(scores @ v[:, i] / scores.sum(axis=-1, keepdims=True))
  y = xp.concatenate(outputs, axis=-1)
  return (y / (1 + xp.exp(-g))) @ params["o_proj"]["kernel"]
