"""Mamba-3, token by token; R = 1 without the vectors of MIMO."""

import numpy as np

from tests.mixers.references.common import root_mean_square_norm, sigmoid, silu, softplus


def rotate(x, angle):
  """Pairs (i, i + A) of x [..., K] as complex numbers, by angle [..., A]."""
  A = angle.shape[-1]
  turned = (x[..., :A] + 1j * x[..., A : 2 * A]) * np.exp(1j * angle)
  return np.concatenate([turned.real, turned.imag, x[..., 2 * A :]], axis=-1)


def mamba3(
  params,
  u,
  *,
  head_dim,
  state_dim,
  num_groups=1,
  decay_rate="softplus",
  decay_floor=1e-4,
  norm_eps=1e-5,
):
  H, R, N = params["b_offset"].shape
  assert state_dim == N
  inner = u @ params["in_proj"]["kernel"] + params["in_proj"].get("bias", 0)
  E, bc = H * head_dim, num_groups * R * N
  cuts = np.cumsum([E, E, bc, bc, H, H, H])
  z, v, b, c, dt, rate, share, angle = np.split(inner, cuts, axis=1)
  of_rank = lambda x, name: x.reshape(len(x), H, 1, -1) * params.get(f"mimo_{name}", 1.0)
  v, z = of_rank(v, "v"), of_rank(z, "z")
  rate = (
    softplus(rate) if decay_rate == "softplus" else np.where(rate > 0, 1 + rate, 1 / (1 - rate))
  )
  dt, share = softplus(dt + params["dt_bias"]), sigmoid(share)
  decay = np.exp(-np.maximum(rate, decay_floor) * dt)
  angles = np.cumsum(np.pi * np.tanh(angle)[:, None] * dt[:, :, None], axis=0)

  def of_heads(x, name):
    x = root_mean_square_norm(
      x.reshape(-1, R, num_groups, N), params[f"{name}_norm"]["scale"], norm_eps
    )
    x = np.repeat(x.swapaxes(1, 2), H // num_groups, axis=1) + params[f"{name}_offset"]
    return rotate(x, angles[:, :, None])

  k, q = of_heads(b, "b"), of_heads(c, "c")
  S, y = np.zeros((H, N, head_dim)), np.zeros_like(v)
  written = np.zeros_like(S)
  for t in range(len(u)):
    S = decay[t][:, None, None] * (S + ((1 - share[t]) * dt[t])[:, None, None] * written)
    written = np.einsum("hrn,hrp->hnp", k[t], v[t])
    S = S + (share[t] * dt[t])[:, None, None] * written
    y[t] = np.einsum("hnp,hrn->hrp", S, q[t]) + params["skip"][:, None, None] * v[t]
  if "norm" in params:
    y = root_mean_square_norm(y, params["norm"]["scale"].reshape(H, 1, -1), norm_eps)
  y = np.sum(y * silu(z) * params.get("mimo_o", 1.0), axis=2).reshape(len(u), E)
  return y @ params["o_proj"]["kernel"] + params["o_proj"].get("bias", 0)
