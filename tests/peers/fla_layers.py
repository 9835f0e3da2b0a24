"""Layers of flash-linear-attention. Their kernels need a GPU: here the layers call fla's own naive
functions, and the norms and convolutions of torch, in place of them."""

import functools
import warnings

import fla.layers.based
import fla.layers.comba
import fla.layers.delta_net
import fla.layers.gated_deltanet
import fla.layers.gated_deltaproduct
import fla.layers.gdn2
import fla.layers.gla
import fla.layers.gsa
import fla.layers.hgrn2
import fla.layers.kda
import fla.layers.multiscale_retention
import fla.layers.rwkv6
import fla.layers.rwkv7
import torch
from fla.modules import FusedRMSNormGated, GroupNorm, RMSNorm, ShortConvolution
from fla.modules.feature_map import SwishFeatureMap
from fla.ops.comba.naive import naive_chunk_comba
from fla.ops.delta_rule.naive import delta_rule_recurrence
from fla.ops.gated_delta_product.naive import naive_recurrent_gated_delta_product
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
from fla.ops.gdn2.naive import naive_recurrent_gdn2
from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence
from fla.ops.gla.naive import naive_recurrent_gla
from fla.ops.gsa.naive import naive_recurrent_gsa
from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
from fla.ops.kda.naive import naive_recurrent_kda
from fla.ops.retention.naive import naive_retention
from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6
from fla.ops.rwkv7.fused_addcmul import torch_addcmul_rwkv7
from fla.ops.rwkv7.fused_k_update import k_update_ref
from fla.ops.rwkv7.gate_output_correction import gate_output_correction_ref
from torch.nn import functional as F

from tests.peers.numbers import DIM, numbers

_turned = lambda *xs: (x.transpose(1, 2) for x in xs)


def _unit(x):
  return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _gla(q, k, v, gk, **_):
  return naive_recurrent_gla(q, k, v, gk)


def _delta(q, k, v, beta, use_qk_l2norm_in_kernel, **_):
  if use_qk_l2norm_in_kernel:
    q, k = _unit(q), _unit(k)
  out, state = delta_rule_recurrence(*_turned(q, k, v, beta))
  return out.transpose(1, 2), state


def _gated_delta(q, k, v, g, beta, allow_neg_eigval, A_log, dt_bias, **_):
  groups = v.shape[2] // q.shape[2]
  q, k = (_unit(x).repeat_interleave(groups, 2) for x in (q, k))
  beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
  g = -A_log.exp() * F.softplus(g + dt_bias)
  return naive_recurrent_gated_delta_rule(q, k, v, beta, g)


def _kda(q, k, v, g, beta, A_log, dt_bias, allow_neg_eigval, lower_bound, **_):
  bounded = {} if lower_bound is None else {"lower_bound": lower_bound}
  gate = naive_kda_lowerbound_gate if bounded else naive_kda_gate
  beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
  return naive_recurrent_kda(_unit(q), _unit(k), v, gate(g, A_log, dt_bias, **bounded), beta)


def _gdn2(q, k, v, g, b, w, **_):
  return naive_recurrent_gdn2(_unit(q), _unit(k), v, g, b, w)


def _comba(q, k, v, p, g, beta, **_):
  """Their form token by token reads the decayed state, unlike this one and the kernels."""
  return naive_chunk_comba(_unit(q), _unit(k), v, _unit(p), g, beta, chunk_size=4)


def _delta_product(q, k, v, g, beta, num_householder, **_):
  options = {"scale": q.shape[-1] ** -0.5, "cu_seqlens": None, "num_householder": num_householder}
  return naive_recurrent_gated_delta_product(_unit(q), _unit(k), v, g, beta, **options)


def _rwkv7(r, w, k, v, a, b, **_):
  r = r.shape[-1] ** 0.5 * r  # theirs divides by it
  out, state = dplr_recurrence(*_turned(r, k, v, a, b, w))
  return out.transpose(1, 2), state


def _rwkv7_of_erase_key(r, w, k, v, kk, a, **_):
  return _rwkv7(r, w, k, v, -kk, kk * a)


def _token_shift_and_last(x, *_, **__):
  return _token_shift(x), None


def _retention(q, k, v, **_):
  return naive_retention(*_turned(q, k, v)).transpose(1, 2), None


def _gsa(q, k, v, s, g, scale, **_):
  return naive_recurrent_gsa(q, k, v, s, g, scale=scale)


def _rwkv6(r, k, v, w, u, scale, **_):
  out, state = naive_recurrent_rwkv6(*_turned(r, k, v, w), u, scale=scale)
  return out.transpose(1, 2), state


def _token_shift(x, *_):
  return F.pad(x, (0, 0, 1, -1)) - x


def _group_norm(self, x):
  y = F.group_norm(x.flatten(0, 1), self.num_groups, self.weight, self.bias, self.eps)
  return y.view_as(x)


def _rotary(self, q, k, **_):
  """The rotation of RoFormer with halves as pairs, at this module's frequencies."""
  angle = torch.arange(q.shape[1])[:, None] * self.inv_freq.double()
  cos, sin = (torch.cat([f(angle)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))
  half = lambda x: torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1)
  return q * cos + half(q) * sin, k * cos + half(k) * sin


def _rms(x, weight, eps):
  y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
  return y if weight is None else y * weight


def _rms_norm_linear(x, norm_weight, norm_bias, weight, bias, eps=1e-5):  # fla's default, too
  return F.linear(_rms(x, norm_weight, eps), weight, bias)


def _gated_norm(self, x, gate):
  gate = torch.sigmoid(gate) if self.activation == "sigmoid" else F.silu(gate)
  return _rms(x, self.weight, self.eps) * gate


def _convolution(x, weight, bias=None, activation=None, **_):
  y = F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))
  y = F.conv1d(y, weight[:, None], bias, groups=len(weight)).transpose(1, 2)
  return (F.silu(y) if activation else y), None


def _short_convolution(self, x, **_):
  return _convolution(x, self.weight[:, 0], self.bias, self.activation)


def patch():
  """Replaces kernels by plain functions."""
  layers = fla.layers
  for module in (layers.gla, layers.hgrn2):
    module.fused_recurrent_gla = module.chunk_gla = _gla
  layers.delta_net.fused_recurrent_delta_rule = _delta
  layers.gated_deltanet.chunk_gated_delta_rule = _gated_delta
  layers.gated_deltanet.causal_conv1d = _convolution
  layers.gsa.fused_recurrent_gsa = _gsa
  layers.multiscale_retention.chunk_retention = _retention
  layers.multiscale_retention.RotaryEmbedding.forward = _rotary
  layers.rwkv6.fused_recurrent_rwkv6 = _rwkv6
  layers.rwkv6.token_shift = _token_shift
  layers.kda.chunk_kda, layers.gdn2.chunk_gdn2 = _kda, _gdn2
  layers.comba.chunk_comba = _comba
  layers.gated_deltaproduct.chunk_gated_delta_product = _delta_product
  layers.rwkv7.chunk_rwkv7, layers.rwkv7.l2_norm = _rwkv7, _unit
  layers.rwkv7.fused_mul_recurrent_rwkv7 = _rwkv7_of_erase_key
  layers.rwkv7.token_shift = _token_shift_and_last
  layers.rwkv7.fused_addcmul_rwkv7 = torch_addcmul_rwkv7
  layers.rwkv7.fused_k_rwkv7 = k_update_ref
  layers.rwkv7.gate_output_correction = gate_output_correction_ref
  GroupNorm.forward = _group_norm
  for module in (layers.gsa, layers.hgrn2):
    module.rms_norm_linear = _rms_norm_linear
  layers.hgrn2.swish = F.silu
  SwishFeatureMap.forward = lambda self, x: F.silu(x)
  RMSNorm.forward = lambda self, x: _rms(x, self.weight, self.eps)
  FusedRMSNormGated.forward = _gated_norm
  ShortConvolution.forward = _short_convolution


def cases():
  warnings.simplefilter("ignore")
  patch()
  gla = functools.partial(
    fla.layers.gla.GatedLinearAttention, hidden_size=DIM, num_heads=2, gate_low_rank_dim=3
  )
  delta = functools.partial(fla.layers.delta_net.DeltaNet, hidden_size=DIM, num_heads=2)
  gated = functools.partial(
    fla.layers.gated_deltanet.GatedDeltaNet, hidden_size=DIM, num_heads=2, head_dim=4
  )
  sizes = {"hidden_size": DIM, "num_heads": 2, "head_dim": 4}
  kda = functools.partial(fla.layers.kda.KimiDeltaAttention, **sizes)
  gdn2 = functools.partial(fla.layers.gdn2.GatedDeltaNet2, **sizes)
  comba = functools.partial(fla.layers.comba.Comba, **sizes)
  product = functools.partial(fla.layers.gated_deltaproduct.GatedDeltaProduct, **sizes)
  ranks = {"decay_low_rank_dim": 3, "gate_low_rank_dim": 4, "a_low_rank_dim": 2}
  ranks |= {"v_low_rank_dim": 5, "num_hidden_layers": 2}
  rwkv7 = functools.partial(
    fla.layers.rwkv7.RWKV7Attention, hidden_size=DIM, head_dim=4, **ranks, fuse_norm=True
  )
  gsa = functools.partial(
    fla.layers.gsa.GatedSlotAttention, hidden_size=DIM, num_heads=2, num_slots=3, layer_idx=0
  )
  retention = functools.partial(
    fla.layers.multiscale_retention.MultiScaleRetention, hidden_size=DIM, num_heads=2
  )
  hgrn2 = functools.partial(
    fla.layers.hgrn2.HGRN2Attention, hidden_size=DIM, expand_ratio=4, layer_idx=1
  )

  def rwkv6(expand_k):
    sizes = {"hidden_size": DIM, "num_heads": 2, "expand_k": expand_k}
    module = fla.layers.rwkv6.RWKV6Attention(**sizes, proj_low_rank_dim=2, gate_low_rank_dim=3)
    module.gate_fn = F.silu
    return module

  eps = {"norm_eps": 1e-6}
  plain = lambda module, x: module(x)[0]
  bound = torch.from_numpy(0.4 + 0.1 * numbers("hgrn2_fla/lower_bound", (DIM,)))
  based = fla.layers.based.BasedLinearAttention(
    DIM, feature_dim=4, num_heads=2, num_key_value_heads=2
  )
  return {
    "based_fla": (based, lambda module, x: module.forward_reference(x)),
    "gla_fla": (gla(**eps), plain),
    "gla_fla_wide": (gla(expand_k=1.0, expand_v=1.5, gate_logit_normalizer=4), plain),
    "gla_fla_grouped": (gla(num_kv_heads=1, clamp_min=-0.03, feature_map="relu"), plain),
    "gla_fla_conv": (
      gla(use_short_conv=True, use_output_gate=False, elementwise_affine=False),
      plain,
    ),
    "delta_net_fla": (delta(**eps), plain),
    "delta_net_fla_sum": (
      delta(
        use_gate=True,
        allow_neg_eigval=True,
        qk_norm="sum",
        qk_activation="elu",
        use_short_conv=False,
        expand_v=2.0,
      ),
      plain,
    ),
    "delta_net_fla_relu": (delta(qk_activation="relu", use_beta=False, expand_k=0.5), plain),
    "delta_net_fla_biases": (
      delta(conv_bias=True, conv_size=3, qk_activation="identity"),
      plain,
    ),
    "gated_delta_net_fla": (gated(**eps), plain),
    "gated_delta_net_fla_grouped": (
      gated(num_v_heads=4, expand_v=1.5, conv_bias=True, conv_size=3),
      plain,
    ),
    "gated_delta_net_fla_no_conv": (
      gated(use_short_conv=False, use_gate=False, allow_neg_eigval=True),
      plain,
    ),
    "kda_fla": (kda(**eps), plain),
    "kda_fla_bounded": (
      kda(num_v_heads=4, expand_v=1.5, lower_bound=-5.0, safe_gate=True, allow_neg_eigval=True),
      plain,
    ),
    "gated_delta_net2_fla": (gdn2(**eps), plain),
    "gated_delta_net2_fla_grouped": (
      gdn2(num_v_heads=4, expand_v=1.5, allow_neg_eigval=True, use_short_conv=False),
      plain,
    ),
    "comba_fla": (comba(**eps), plain),
    "comba_fla_plain": (
      comba(use_inner_decay=False, use_output_correction=False, use_output_gate=False, conv_size=3),
      plain,
    ),
    "delta_product_fla": (product(**eps), plain),
    "delta_product_fla_three": (
      product(
        num_householder=3, use_forget_gate=False, allow_neg_eigval=False, use_output_gate=False
      ),
      plain,
    ),
    "rwkv7_fla": (rwkv7(layer_idx=0), plain),
    "rwkv7_fla_later": (rwkv7(layer_idx=1), lambda module, x: module(x, v_first=x)[0]),
    "gsa_fla": (gsa(**eps), plain),
    "gsa_fla_grouped": (gsa(num_kv_heads=1, feature_map="relu", use_short_conv=True), plain),
    "gsa_fla_gates": (gsa(gate_logit_normalizer=4, scale=0.5), plain),
    "retnet_fla_wide": (retention(expand_v=1.5), plain),
    "retnet_fla": (retention(**eps), plain),
    "retnet_fla_affine": (retention(elementwise_affine=False, num_kv_heads=1), plain),
    "rwkv6_fla": (rwkv6(1.0), plain),
    "rwkv6_fla_narrow": (rwkv6(0.5), plain),
    "hgrn2_fla": (hgrn2(), lambda module, x: module(x, lower_bound=bound)[0]),
  }
