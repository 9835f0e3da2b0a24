"""Which layer of ours is compared with each recorded one, and whose parameters are whose.

Constants are parameters of ours that the other side does not learn.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lnssm_jax.mixers import MIXERS
from lnssm_jax.models.channel_mixers import CHANNEL_MIXERS
from tests.peers.maps import (
  Arrays,
  attention,
  base_conv,
  channel_delta,
  comba,
  cosformer,
  delta_net,
  dsf_attention,
  dss,
  gla,
  gpt2_mlp,
  griffin,
  gsa,
  hgrn2,
  hgrn2_authors,
  hgrn_authors,
  hyena,
  latent_attention,
  log_linear,
  mamba,
  mamba2,
  mamba3,
  mlp,
  mlstm,
  mlstm_block,
  qlstm,
  qwen3_next,
  retnet,
  rwkv4,
  rwkv5,
  rwkv6,
  rwkv7,
  rwkv_mlp,
  s4,
  s4d,
  s5,
  s6,
  short_conv,
  sse,
  tnl,
  tnn,
  torchscale,
  transnormer,
)
from tests.peers.numbers import DIM, numbers


class Peer(NamedTuple):
  """A layer of ours, and the map from their parameters to ours."""

  layer: str  # a name in MIXERS or CHANNEL_MIXERS
  options: dict[str, Any]
  params: Callable[[Arrays], dict[str, Any]]
  constants: dict[str, np.ndarray] = {}  # noqa: RUF012

  @property
  def cls(self) -> type[Any]:
    return (MIXERS | CHANNEL_MIXERS)[self.layer]


HEADS = {"num_heads": 2}
EPS = {"norm_eps": 1e-6}
GROUPED = HEADS | {"num_kv_heads": 1}
MAMBA = {"state_dim": 3, "gate_rank": 2}
MAMBA2 = {"state_dim": 3, "head_dim": 4}
MAMBA3 = {"state_dim": 8, "head_dim": 4}
MAMBA3_NORM = {"num_groups": 2, "rotary_fraction": 1.0, "output_norm": True, "decay_floor": 0.7}
MAMBA3_LATER = MAMBA3 | {"decay_rate": "heavy_tail"}
FALCON_H1 = MAMBA2 | {"num_groups": 2, "norm_eps": 1e-5}
GRIFFIN = HEADS | {"use_bias": True}
FLA_RWKV6 = HEADS | {"mix_rank": 2, "gate_rank": 3, "norm_eps": 1e-5 / 64}
MLA = HEADS | {"kv_rank": 6, "head_dim": 7, "rotary_width": 4, "value_head_dim": 2}
MLA |= {"max_length": 8}
RWKV7 = HEADS | {"decay_rank": 3, "rate_rank": 2, "gate_rank": 4}
DSF = HEADS | {"head_dim": 6}
SAFARI = {"max_length": 8, "filter_dim": 4, "use_bias": True}
# A bound b of ours is a share 1 - exp(-b^2); they pass the share.
BOUND = lambda name: {"bound": np.sqrt(-np.log1p(-0.4 - 0.1 * numbers(name, (DIM,))))}
HGRN = {"layer": 1, "num_layers": 2, "output_bias": True}

PEERS = {
  "mamba": Peer("mamba", MAMBA, mamba),
  "mamba_biases": Peer("mamba", MAMBA | {"use_bias": True, "conv_bias": False}, mamba),
  "mamba_sizes": Peer("mamba", MAMBA | {"expand": 1, "conv_size": 3}, mamba),
  "mamba2_clipped": Peer("mamba2", MAMBA2 | {"min_step": 0.6, "max_step": 0.9}, mamba2),
  "mamba2_sizes": Peer("mamba2", MAMBA2 | {"expand": 1, "conv_size": 2}, mamba2),
  "falcon_mamba": Peer("mamba", MAMBA | {"inner_norm": "rms"}, mamba),
  "jamba": Peer("mamba", MAMBA | {"inner_norm": "scaled_rms"}, mamba),
  "mamba2": Peer("mamba2", MAMBA2, mamba2),
  "mamba2_groups": Peer(
    "mamba2", MAMBA2 | {"num_groups": 2, "use_bias": True, "conv_bias": False}, mamba2
  ),
  "falcon_h1": Peer("mamba2", FALCON_H1 | {"norm_order": "norm_first"}, mamba2),
  "falcon_h1_gate_first": Peer("mamba2", FALCON_H1, mamba2),
  "falcon_h1_no_norm": Peer("mamba2", FALCON_H1 | {"norm_order": "none"}, mamba2),
  "recurrent_gemma_block": Peer("rg_lru", GRIFFIN, griffin),
  "recurrent_gemma_sizes": Peer("rg_lru", GRIFFIN | {"width": 16, "conv_size": 3}, griffin),
  "recurrent_gemma_attention": Peer(
    "softmax_attention", HEADS | {"rotary_width": 2, "use_bias": "o", "max_length": 8}, attention
  ),
  "recurrent_gemma_mlp": Peer(
    "geglu", {"hidden": 12, "use_bias": True, "activation": "gelu_tanh"}, mlp
  ),
  "qwen3_next": Peer(
    "gated_delta_net",
    HEADS | {"num_value_heads": 4, "head_dim": 4, "expand_v": 0.75} | EPS,
    qwen3_next,
  ),
  "lfm2_short_conv": Peer("short_conv", {}, short_conv),
  "lfm2_short_conv_biases": Peer(
    "short_conv", {"conv_size": 4, "use_bias": True, "conv_bias": True}, short_conv
  ),
  "log_linear_fla": Peer("log_linear", MAMBA2 | {"use_bias": True, "conv_bias": False}, log_linear),
  "log_linear_fla_groups": Peer("log_linear", MAMBA2 | {"num_groups": 2}, log_linear),
  "mamba3": Peer("mamba3", MAMBA3, mamba3),
  "mamba3_norm": Peer("mamba3", MAMBA3_LATER | MAMBA3_NORM, mamba3),
  "mamba3_mimo": Peer("mamba3", MAMBA3_LATER | {"mimo_rank": 2}, mamba3),
  "mamba3_mimo_norm": Peer("mamba3", MAMBA3_LATER | MAMBA3_NORM | {"mimo_rank": 3}, mamba3),
  "xlstm": Peer("mlstm", HEADS, mlstm),
  "xlstm_block": Peer(
    "mlstm",
    HEADS | {"variant": "block", "gate_soft_cap": None, "denominator_eps": 0.0, "norm_eps": 1e-5},
    mlstm_block,
  ),
  "xlstm_biases": Peer(
    "mlstm",
    HEADS
    | {"expand_k": 1.0, "expand_v": 2.0, "gate_soft_cap": 1.5, "denominator_eps": 0.1}
    | {"use_bias": True, "norm_eps": 1e-3},
    mlstm,
  ),
  "llama": Peer("softmax_attention", GROUPED | {"max_length": 8}, attention),
  "llama_mlp": Peer("swiglu", {"hidden": 12, "use_bias": True}, mlp),
  "llama_mlp_gelu": Peer("geglu", {"hidden": 12}, mlp),
  "gpt2_mlp": Peer("gpt2", {"hidden": 12, "use_bias": True, "activation": "gelu_tanh"}, gpt2_mlp),
  "qwen2": Peer("softmax_attention", GROUPED | {"use_bias": "qkv", "max_length": 8}, attention),
  "qwen3": Peer("softmax_attention", GROUPED | {"qk_norm": True, "max_length": 8}, attention),
  "deepseek_v3": Peer("softmax_attention", MLA | {"q_rank": 5, "use_bias": True}, latent_attention),
  "deepseek_v2_lite": Peer("softmax_attention", MLA, latent_attention),
  "kimi_linear_mla": Peer(
    "softmax_attention", MLA | {"q_rank": 5, "positions": "none"}, latent_attention
  ),
  "gemma2": Peer(
    "softmax_attention", GROUPED | {"soft_cap": 0.7, "scale": 0.5, "max_length": 8}, attention
  ),
  "rwkv": Peer("rwkv4", {}, rwkv4),
  "based_fla": Peer("based", HEADS | {"head_dim": 4}, attention),
  "gla_fla_wide": Peer(
    "gla",
    HEADS | {"gate_rank": 3, "expand_k": 1.0, "expand_v": 1.5, "gate_logit_normalizer": 4.0},
    gla,
  ),
  "gla_fla": Peer("gla", HEADS | {"gate_rank": 3} | EPS, gla),
  "gla_fla_grouped": Peer(
    "gla", GROUPED | {"gate_rank": 3, "clamp_min": -0.03, "feature_map": "relu"}, gla
  ),
  "gla_fla_conv": Peer(
    "gla",
    HEADS | {"gate_rank": 3, "conv_size": 4, "use_gate": False, "norm_scale": False},
    gla,
  ),
  "delta_net_fla": Peer("delta_net", HEADS | EPS, delta_net),
  "delta_net_fla_sum": Peer(
    "delta_net",
    HEADS
    | {"use_gate": True, "allow_neg_eigval": True, "qk_norm": "sum", "qk_activation": "elu"}
    | {"conv_size": None, "expand_v": 2.0},
    delta_net,
  ),
  "delta_net_fla_relu": Peer(
    "delta_net", HEADS | {"qk_activation": "relu", "use_beta": False, "expand_k": 0.5}, delta_net
  ),
  "delta_net_fla_biases": Peer(
    "delta_net", HEADS | {"conv_bias": True, "conv_size": 3, "qk_activation": "identity"}, delta_net
  ),
  "gated_delta_net_fla": Peer("gated_delta_net", HEADS | {"head_dim": 4} | EPS, delta_net),
  "gated_delta_net_fla_grouped": Peer(
    "gated_delta_net",
    HEADS
    | {"num_value_heads": 4, "head_dim": 4, "expand_v": 1.5, "conv_bias": True, "conv_size": 3},
    delta_net,
  ),
  "gated_delta_net_fla_no_conv": Peer(
    "gated_delta_net",
    HEADS | {"head_dim": 4, "conv_size": None, "use_gate": False, "allow_neg_eigval": True},
    delta_net,
  ),
  "kda_fla": Peer("kda", HEADS | EPS, channel_delta),
  "kda_fla_bounded": Peer(
    "kda",
    HEADS | {"num_value_heads": 4, "expand_v": 1.5, "lower_bound": -5.0, "allow_neg_eigval": True},
    channel_delta,
  ),
  "gated_delta_net2_fla": Peer("gated_delta_net2", HEADS | EPS, channel_delta),
  "gated_delta_net2_fla_grouped": Peer(
    "gated_delta_net2",
    HEADS | {"num_value_heads": 4, "expand_v": 1.5, "allow_neg_eigval": True, "conv_size": None},
    channel_delta,
  ),
  "comba_fla": Peer("comba", HEADS | EPS, comba),
  "comba_fla_plain": Peer(
    "comba",
    HEADS
    | {"use_inner_decay": False, "use_output_correction": False, "use_gate": False}
    | {"conv_size": 3},
    comba,
  ),
  "delta_product_fla": Peer("delta_product", HEADS | EPS, delta_net),
  "delta_product_fla_three": Peer(
    "delta_product",
    HEADS
    | {"num_householder": 3, "use_forget_gate": False, "allow_neg_eigval": False}
    | {"use_gate": False},
    delta_net,
  ),
  "rwkv7_fla": Peer("rwkv7", RWKV7, rwkv7),
  "rwkv7_fla_later": Peer("rwkv7", RWKV7 | {"layer": 1, "num_layers": 2, "value_rank": 5}, rwkv7),
  "gsa_fla": Peer("gsa", HEADS | {"num_slots": 3}, gsa),
  "gsa_fla_grouped": Peer(
    "gsa", GROUPED | {"num_slots": 3, "feature_map": "relu", "conv_size": 4}, gsa
  ),
  "gsa_fla_gates": Peer(
    "gsa", HEADS | {"num_slots": 3, "gate_logit_normalizer": 4.0, "scale": 0.5}, gsa
  ),
  "sse_authors": Peer(
    "sse", HEADS | {"num_selected": 2, "lora_rank": 4, "gate_rank": 3, "feature_map": "silu"}, sse
  ),
  "retnet_fla_wide": Peer("retnet", HEADS | {"expand_v": 1.5}, retnet),
  "retnet_fla": Peer("retnet", HEADS | EPS, retnet),
  "retnet_fla_affine": Peer("retnet", GROUPED | {"norm_scale": False}, retnet),
  "hgrn2_fla": Peer(
    "hgrn2",
    HEADS | {"layer": 1, "num_layers": 2, "variant": "fla"},
    hgrn2,
    BOUND("hgrn2_fla/lower_bound"),
  ),
  "hgrn_authors": Peer("hgrn", HGRN, hgrn_authors, BOUND("lower_bound")),
  "hgrn2_authors": Peer("hgrn2", HEADS | HGRN, hgrn2_authors, BOUND("lower_bound")),
  # Ours divides by 8 before the norm, whose eps is then 64 times smaller.
  "rwkv6_fla": Peer("rwkv6", FLA_RWKV6, rwkv6),
  "rwkv6_fla_narrow": Peer("rwkv6", FLA_RWKV6 | {"expand_k": 0.5}, rwkv6),
  "tnl_lightning": Peer(
    "tnl",
    HEADS | {"layer": 1, "num_layers": 3, "positions": "none"},
    tnl,
    {"fixed_log_rate": np.log([2**-4, 2**-8]) + np.log(0.5 + 1e-5)},
  ),
  # Without epsilon, which is under their root: TransNormerLLM adds it to the rms.
  "tnl_transnormerllm": Peer(
    "tnl",
    HEADS | {"layer": 0, "num_layers": 3, "variant": "transnormerllm", "norm_eps": 1e-20},
    transnormer,
    {"fixed_log_rate": np.log([2**-4, 2**-8]) + np.log(1 + 1e-5)},
  ),
  "hyena_safari": Peer("hyena", SAFARI, hyena),
  "hyena_safari_order": Peer("hyena", SAFARI | {"order": 3}, hyena),
  "hyena_safari_filter": Peer("hyena", SAFARI | {"filter_layers": 2}, hyena),
  "s4d": Peer("s4d", {"state_dim": 6}, s4d),
  "s4": Peer("s4", {"state_dim": 6}, s4),
  "s5_authors": Peer("s5", {"state_dim": 6, "gelu": "tanh"}, s5),
  "linear_attention_dsf": Peer("linear_attention", DSF, dsf_attention),
  "softmax_attention_dsf": Peer(
    "softmax_attention",
    DSF | {"positions": "none", "use_bias": "o", "max_length": 8},
    dsf_attention,
  ),
  "normalized_attention_dsf": Peer("normalized_attention", DSF, dsf_attention),
  "qlstm_dsf": Peer("qlstm", {}, qlstm),
  "qlstm_reversed_dsf": Peer("qlstm_reversed", {}, qlstm),
  "s6_dsf": Peer("s6", {"state_dim": 3}, s6),
  "ssd_dsf": Peer("ssd", {"state_dim": 3}, s6),
  "base_conv_zoology": Peer("base_conv", {}, base_conv),
  "base_conv_zoology_long": Peer("base_conv", {"max_length": 8}, base_conv),
  "tnn_authors": Peer(
    "tnn",
    {"expand": 2, "max_length": 8, "decay": 0.875, "filter_dim": 4, "filter_layers": 2}
    | {"filter_norm": "rms_plus_eps"},
    tnn,
  ),
  "cosformer": Peer("cosformer", HEADS | {"max_length": 6, "use_bias": True}, cosformer),
  "dss_authors_softmax": Peer("dss", {"state_dim": 3, "kernel_length": 6}, dss),
  "dss_authors": Peer("dss", {"state_dim": 3, "separate_steps": True}, dss),
  "rwkv5_authors": Peer("rwkv5", HEADS | {"layer": 1, "num_layers": 3}, rwkv5),
  "rwkv5_mlp": Peer("rwkv4_channel_mix", {"hidden": 12}, rwkv_mlp),
  "rwkv6_mlp": Peer("rwkv6_channel_mix", {"hidden": 12, "mu_of": "previous"}, rwkv_mlp),
  "rwkv5_x051a": Peer("rwkv5", HEADS | {"layer": 1, "num_layers": 3, "decay": "head"}, rwkv5),
  "retnet_torchscale": Peer(
    "retnet",
    HEADS | {"frequencies": "torchscale", "norm_scale": False, "norm_eps": 1e-20},
    torchscale,
  ),
}
