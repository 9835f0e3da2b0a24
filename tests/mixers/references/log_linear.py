"""Log-linear attention on Mamba-2: every pair of tokens with its level."""

import numpy as np

from tests.mixers.references.common import convolution, root_mean_square_norm, silu, softplus


def log_linear(params, u, *, head_dim, num_groups=1, norm_eps=1e-5):
  T, (H, levels) = len(u), params["level_weight"].shape
  E, rows = H * head_dim, params["conv"]["kernel"].shape[1]
  inner = u @ params["in_proj"]["kernel"] + params["in_proj"].get("bias", 0)
  z, xbc, dt, weights = np.split(inner, np.cumsum([E, rows, H]), axis=1)
  xbc = silu(convolution(params["conv"], xbc))
  x, b, c = np.split(xbc, [E, (rows + E) // 2], axis=1)
  x = x.reshape(T, H, head_dim)
  of_heads = lambda z: np.repeat(z.reshape(T, num_groups, -1), H // num_groups, axis=1)
  b, c, dt = of_heads(b), of_heads(c), softplus(dt + params["dt_bias"])
  log_decay = -np.exp(params["log_rate"]) * dt
  weights = softplus(params["level_weight"] * weights.reshape(T, H, levels))
  y = params["skip"][:, None] * x
  for t in range(T):
    for s in range(t + 1):
      level = (t ^ s).bit_length()
      decay = np.exp(np.sum(log_decay[s + 1 : t + 1], axis=0))
      score = weights[t, :, level] * decay * np.sum(c[t] * b[s], axis=-1) * dt[s]
      y[t] += score[:, None] * x[s]
  y = y.reshape(T, E) * silu(z)
  y = root_mean_square_norm(y.reshape(T, num_groups, -1), 1.0, norm_eps).reshape(T, E)
  return (y * params["norm"]["scale"]) @ params["o_proj"]["kernel"] + params["o_proj"].get(
    "bias", 0
  )
