"""The number of parameters of each mixer is that of its equations.

(LCSM's codes are in test_lcsm.py, the papers' models in test_mamba.py and in tests/models.)
"""

import jax
import pytest
from flax import nnx

from lnssm_jax.mixers import MIXERS
from lnssm_jax.models import count_parameters

D, H, K, N, R = 64, 4, 10, 8, 6  # width, heads, width per head, states, ranks
E = 96  # width inside
HEADS = {"num_heads": H}
DELTA = 4 * D**2 + D * H + 4 * 3 * D + D // H  # q, k, v, output, rates, convolutions, norm
STATE_SPACE_OUTPUT = 2 * D**2 + 2 * D

COUNTS = [
  ("base_conv", {}, D**2 + D + 4 * D),
  ("base_conv", {"max_length": 9}, D**2 + D + 4 * 16 + 17 * D),
  ("based", HEADS, 2 * D * H * 16 + 2 * D**2),
  # As gated_delta_net, and two numbers per head.
  ("comba", HEADS, 8 * D**2 + 2 * D * H + 4 * 4 * D + 2 * D // H + 4 * H),
  ("cosformer", HEADS, 4 * D**2),
  ("delta_net", HEADS, DELTA),
  # Values of width 2 D, decays, output gate.
  ("gated_delta_net", HEADS, 8 * D**2 + 2 * D * H + 4 * 4 * D + 2 * D // H + 2 * H),
  # Two keys and values of width 2 D per token.
  ("delta_product", HEADS, 11 * D**2 + 3 * D * H + 4 * 7 * D + 2 * D // H + 2 * H),
  # Gates for all channels of keys and values; decays and output gate of rank V.
  ("gated_delta_net2", HEADS, DELTA - D * H + 2 * D**2 + 4 * D * D // H + 2 * D + H),
  ("kda", HEADS, DELTA + 4 * D * D // H + 2 * D + H),
  ("dss", {"state_dim": N}, STATE_SPACE_OUTPUT + 2 * D + 2 * N + 2 * D * N),
  ("gateloop", HEADS, 7 * D**2 + 3 * D),
  ("gfw", HEADS, 6 * D**2 + 2 * D),
  ("gfw", HEADS | {"head_dim": K}, 3 * D * H * K + 3 * D**2 + 2 * D),
  # Keys of width D / 2, the gate of rank 16 with its bias, the norm.
  ("gla", HEADS, D**2 + 3 * D**2 + 16 * (D + D // 2) + D // 2 + D // H),
  ("gsa", HEADS, 4 * D**2 + D * H * 64 + D),
  ("gsa", HEADS | {"norm_scale": False}, 4 * D**2 + D * H * 64),
  ("hgrn", {}, 7 * D**2 + (5 + 1 + 1 + 4) * D),
  ("hgrn2", HEADS, 4 * D**2 + 6 * D),
  (
    "hyena",
    {"filter_dim": R},
    4 * D**2 + 4 * 3 * D + 4 * R + 2 * (R**2 + R) + R * D + R + D,
  ),
  ("linear_attention", HEADS, 4 * D**2 + 4 * D),
  ("lln", HEADS, 4 * D**2),
  ("lln", HEADS | {"mixture": "convex"}, 4 * D**2 + D),
  ("lln", HEADS | {"mixture": "free", "use_bias": True}, 4 * D**2 + 6 * D),
  ("lrn", {}, 4 * D**2 + 3 * D),
  ("lrn", {"output_gate": "none"}, 3 * D**2 + 2 * D),
  ("lrpe", HEADS, 4 * D**2 + 3 * D),
  ("lrpe", HEADS | {"use_bias": True}, 4 * D**2 + 7 * D),
  # As Mamba-2 below, with 15 weights per head, and what multiplies them.
  (
    "log_linear",
    {},
    D * (2 * 128 + 2 * 128 + 2 * 16) + 5 * (128 + 2 * 128) + 3 * 2 + 128 + D * 128 + 2 * 15,
  ),
  # Width 128 inside, of two heads of 64; convolution, decays, steps and skips, norm.
  ("mamba2", {}, D * (2 * 128 + 2 * 128 + 2) + 5 * (128 + 2 * 128) + 3 * 2 + 128 + D * 128),
  # Gate, values, b, c, steps, decays, shares, angles; biases and norms of b and c; skips, steps.
  (
    "mamba3",
    {},
    D * (4 * D + 2 * 128 + 3 * 2 + 32) + 2 * (2 * 128 + 128) + 2 * 2 + 2 * D**2,
  ),
  # Queries and decays of width D / 2; values, gate and output of D.
  ("metala", HEADS, D**2 + 3 * D**2 + 4 * D + D // 2 + D),
  # Queries and keys of width D / 2; values, gate, output; gates with biases, norm.
  ("mlstm", HEADS, D**2 + 3 * D**2 + 2 * (D + 1) * H + D),
  (
    "normalized_attention",
    HEADS | {"head_dim": K},
    (2 * D + 2) * H * K + 2 * (D**2 + D) + (D + 1) * H,
  ),
  ("qlstm", {"expand": 3, "conv_size": 3}, 9 * D**2 + 27 * D**2 + 9 * D + 4 * 3 * D),
  ("qlstm_reversed", {"expand": 3, "conv_size": 3}, 9 * D**2 + 27 * D**2 + 9 * D + 4 * 3 * D + 1),
  ("rg_lru", HEADS | {"width": E}, 3 * D * E + 5 * E + 2 * (E**2 // H + E) + E),
  ("rwkv4", {}, 4 * D**2 + 5 * D),
  ("rwkv5", HEADS, 5 * D**2 + 8 * D),
  ("rwkv6", HEADS, 5 * D**2 + 10 * D + 2 * 5 * 32 * D + 2 * 64 * D),
  ("rwkv7", HEADS, 4 * D**2 + 13 * D + 3 * 2 * 32 * D),
  ("s4", {"state_dim": N}, 2 * D**2 + 4 * D + D * N + 3 * N),
  ("s4d", {"state_dim": N}, STATE_SPACE_OUTPUT + 2 * D + 4 * D * N // 2),
  ("s5", {"state_dim": N}, 2 * D * N + 3 * N // 2 + D**2 + 2 * D),
  ("short_conv", {}, 4 * D**2 + 3 * D),
  ("softmax_attention", HEADS, 4 * D**2),
  ("softmax_attention", HEADS | {"num_kv_heads": 2, "use_bias": True}, 3 * D**2 + 3 * D),
  (
    "softmax_attention",
    HEADS | {"kv_rank": N, "q_rank": R, "rotary_width": 4},
    D * (N + 4) + N + N * (2 * D - 4 * H) + D * R + R + R * D + D**2,
  ),
  ("tnl", HEADS, 4 * D**2 + 2 * D * D // H + 3 * D + H),
  (
    "tnn",
    {"max_length": 6, "filter_dim": R, "expand": 2},
    3 * D * 2 * D + 2 * 2 * D + D + 2 * R + 3 * (R**2 + R) + (R + 1) * 2 * D,
  ),
]


@pytest.mark.parametrize(("name", "options", "count"), COUNTS)
def test_parameter_count_matches_formula(name, options, count):
  layer = jax.eval_shape(lambda: MIXERS[name](D, **options, rngs=nnx.Rngs(0)))
  assert count_parameters(layer) == count
