"""Log-linear Mamba-2 of fla: its naive function takes the place of its kernel."""

import fla.layers.log_linear_mamba2 as log_linear
import torch
from fla.ops.log_linear_attn.naive import naive_log_linear_attn
from torch.nn import functional as F

from tests.peers.numbers import DIM


def _kernel(q, k, v, g, level_scales, scale, **_):
  return naive_log_linear_attn(q, k, v, g, level_scales, scale), None


def _convolve(x, weight, bias, activation, **_):
  assert activation == "silu"
  y = F.conv1d(F.pad(x, (len(weight[0]) - 1, 0)), weight[:, None], bias, groups=len(weight))
  return F.silu(y)


def _norm(self, x, z):
  assert not self.norm_before_gate
  groups = (x * F.silu(z)).unflatten(-1, (-1, self.group_size))
  y = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
  return y.flatten(-2) * self.weight


def cases():
  log_linear.chunk_log_linear_attn = _kernel
  log_linear.causal_conv1d_fn = _convolve
  log_linear.RMSNormGated.forward = _norm
  call = lambda layer, x: layer.cuda_kernels_forward(x)[0]
  build = lambda **options: log_linear.LogLinearMamba2(
    hidden_size=DIM, head_dim=4, num_heads=4, state_size=3, **options
  )
  return {
    "log_linear_fla": (build(), call),
    "log_linear_fla_groups": (build(n_groups=2, use_bias=False, use_conv_bias=True), call),
  }
