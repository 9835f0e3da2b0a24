"""Tiny models of flash-linear-attention, with the functions of `fla_layers` in place of kernels.

Their cached decoding has kernels only, so it is not recorded.
"""

import fla.layers.attn
import fla.layers.gated_deltanet
import fla.layers.multiscale_retention
import fla.models.rwkv6.modeling_rwkv6
import fla.models.rwkv7.modeling_rwkv7
import torch
from fla import models
from fla.modules import LayerNorm, RMSNorm
from fla.modules.activations import ACT2FN
from fla.modules.mlp import SwiGLULinear
from torch.nn import functional as F

from tests.peers import fla_layers
from tests.peers.fla_layers import _gated_delta, _retention, _rms, _token_shift

SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 11, "intermediate_size": 12}


def _attention(q, k, v, causal, window_size):
  T, groups = q.shape[1], q.shape[2] // k.shape[2]
  q, k, v = q.transpose(1, 2), *(x.repeat_interleave(groups, 2).transpose(1, 2) for x in (k, v))
  distance = torch.arange(T)[:, None] - torch.arange(T)
  seen = (distance >= 0) & ((window_size[0] < 0) | (distance <= window_size[0]))
  return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)


def _after_sum(norm):
  """A forward pass that may first add a residual, and return the sum too."""

  def forward(self, x, residual=None, prenorm=False, **_):
    x = x if residual is None else x + residual
    return (norm(self, x), x) if prenorm else norm(self, x)

  return forward


def patch():
  """Puts functions that run on a CPU in place of fla's kernels."""
  fla_layers.patch()
  fla.layers.attn.flash_attn_func = _attention
  fla.layers.gated_deltanet.fused_recurrent_gated_delta_rule = _gated_delta
  fla.layers.multiscale_retention.fused_recurrent_retention = _retention
  fla.models.rwkv6.modeling_rwkv6.token_shift = _token_shift
  fla.models.rwkv7.modeling_rwkv7.token_shift = fla_layers._token_shift_and_last
  ACT2FN.update(swish=F.silu, sqrelu=lambda x: F.relu(x).square())
  RMSNorm.forward = _after_sum(lambda self, x: _rms(x, self.weight, self.eps))
  LayerNorm.forward = _after_sum(
    lambda self, x: F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
  )
  SwiGLULinear.forward = lambda self, x, y, weight, bias: F.linear(F.silu(x) * y, weight, bias)


def cases():
  patch()

  def model(name, heads=2, **options):
    config = getattr(models, f"{name}Config")(**SIZES | options, num_heads=heads)
    return getattr(models, f"{name}ForCausalLM")(config), None

  ranks = {"proj_low_rank_dim": 2, "gate_low_rank_dim": 3}
  attention = {"layers": [1], "num_heads": 2, "num_kv_heads": 1, "rope_theta": 50.0}
  windowed, three = {"window_size": 3, "num_kv_heads": None}, {"num_hidden_layers": 3}
  return {
    "fla_transformer": model("Transformer", num_kv_heads=1, qkv_bias=True, window_size=4),
    "fla_transformer_qk_norm": model("Transformer", qk_norm=True, tie_word_embeddings=True),
    "fla_gla": model("GLA"),
    "fla_gla_options": model(
      "GLA", num_kv_heads=1, use_short_conv=True, clamp_min=-0.03, feature_map="relu"
    ),
    "fla_retnet": model("RetNet", num_kv_heads=1),
    "fla_delta_net": model("DeltaNet"),
    "fla_delta_net_options": model(
      "DeltaNet", use_gate=True, allow_neg_eigval=True, qk_norm="sum", qk_activation="elu"
    ),
    "fla_gated_deltanet": model("GatedDeltaNet", head_dim=4),
    "fla_gated_deltanet_grouped": model(
      "GatedDeltaNet", head_dim=4, num_v_heads=4, expand_v=1.5, allow_neg_eigval=True
    ),
    "fla_gsa": model("GSA", num_slots=3),
    "fla_hgrn2": model("HGRN2", expand_ratio=4),
    # Hybrids: attention in some layers, with heads of their own.
    "fla_gla_attn": model("GLA", heads=4, **three, attn=attention | {"qkv_bias": True}),
    "fla_retnet_attn": model("RetNet", **three, attn=attention | {"layers": [0]}),
    "fla_delta_net_attn": model("DeltaNet", **three, attn=[attention]),
    "fla_gated_deltanet_attn": model("GatedDeltaNet", head_dim=4, attn=attention | windowed),
    "fla_gsa_attn": model("GSA", num_slots=3, attn=attention | windowed | {"num_kv_heads": 1}),
    "fla_hgrn2_attn": model("HGRN2", expand_ratio=4, use_lower_bound=False, attn=attention),
    "fla_rwkv6_attn": model("RWKV6", heads=4, **ranks, attn=attention | {"layers": [0]}),
    "fla_rwkv7": model(
      "RWKV7",
      head_dim=4,
      num_hidden_layers=3,
      decay_low_rank_dim=2,
      gate_low_rank_dim=3,
      a_low_rank_dim=4,
      v_low_rank_dim=5,
    ),
    "fla_rwkv6": model("RWKV6", **ranks),
  }
