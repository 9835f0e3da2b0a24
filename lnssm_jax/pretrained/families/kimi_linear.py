"""Kimi Linear (Moonshot AI 2025): KDA, latent attention without positions, and experts.

Settings are those of Kimi-Linear-48B-A3B's own class, whose tensors the file has, and those that
transformers 5.23 writes; defaults are of the latter.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lnssm_jax.pretrained.families.fields import (
  Config,
  Field,
  Fixed,
  Same,
  count_of_layers,
  flag,
  free,
  number,
  size,
  size_or_none,
  whole,
  without,
)
from lnssm_jax.pretrained.families.hybrids import ATTENTION, by_layers, group, of_layers
from lnssm_jax.pretrained.families.llama import LAYER, SIZES, TOP
from lnssm_jax.pretrained.families.table import (
  GATED_MLP,
  Family,
  Row,
  Rows,
  View,
  convolution,
  experts,
  joined,
  linear,
  linears,
  norm,
)
from lnssm_jax.pretrained.manifest import ExportError

_KDA, _DENSE, _MOE = (
  "mixer_options.kda",
  "channel_mixer_options.swiglu",
  "channel_mixer_options.moe",
)
_SELF, _EXPERTS = f"{LAYER}.self_attn", f"{LAYER}.block_sparse_moe"
_FULL, _LINEAR = "full_attention", "linear_attention"
_MIXERS = {_FULL: "softmax_attention", _LINEAR: "kda"}
# {setting of linear_attn_config: of transformers}
_OF_KDA = {
  "head_dim": "linear_head_dim",
  "num_heads": "linear_num_heads",
  "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def kimi_linear(config: Config) -> Config:
  """Writes out what follows from other settings."""
  L, given = count_of_layers(config), config.pop("linear_attn_config", None) or {}
  if not isinstance(given, dict):
    raise ExportError(f"linear_attn_config={given!r:.80} is not an object.")
  given = dict(given)
  lists = [given.pop(name, None) for name in ("full_attn_layers", "kda_layers")]
  for name in given:
    if name not in _OF_KDA:
      raise ExportError(f"linear_attn_config.{name}={given[name]!r:.80} is not a known setting.")
  config |= {_OF_KDA[name]: value for name, value in given.items()}
  types = config.pop("layer_types", None)
  if types is None and lists != [None, None]:
    full = lists[0] if isinstance(lists[0], list) else []
    types = [_FULL if i + 1 in full else _LINEAR for i in range(L)]
    if lists[1] != [i + 1 for i, x in enumerate(types) if x == _LINEAR]:
      raise ExportError(
        f"linear_attn_config: kda_layers={lists[1]!r:.80} are not the layers without"
        f" full_attn_layers={lists[0]!r:.80}, of 1 to {L}."
      )
  if types is None:
    types = [_FULL if i and i % 4 == 0 else _LINEAR for i in range(L)]
  dense = config.pop("first_k_dense_replace", 1)
  if type(dense) is not int:
    raise ExportError(f"first_k_dense_replace={dense!r:.80} must be a whole number.")
  kinds = config.pop("mlp_layer_types", None)
  if kinds is None:
    kinds = ["dense" if i < dense else "sparse" for i in range(L)]
  for name, several, known in (
    ("layer_types", types, _MIXERS),
    ("mlp_layer_types", kinds, ("dense", "sparse")),
  ):
    if not isinstance(several, list) or len(several) != L or not {*map(str, several)} <= {*known}:
      raise ExportError(f"{name}={several!r:.80} must be {L} of {' and '.join(known)}.")
  H = whole(config, "num_attention_heads", 32)
  config.setdefault("num_attention_heads", H)
  rope, nope = whole(config, "qk_rope_head_dim", 64), whole(config, "qk_nope_head_dim", 128)
  width, count = (
    whole(config, "moe_intermediate_size", 1024),
    whole(config, "num_shared_experts", 1),
  )
  config = without(config, "num_shared_experts", "qk_nope_head_dim")
  config |= {"qk_rope_head_dim": rope, "key_width": nope + rope, "shared_width": width * count}
  channels = ["swiglu" if x == "dense" else "moe" for x in kinds]
  return by_layers(config, [_MIXERS[x] for x in types], channels)


def kimi_linear_written(config: Config) -> Config:
  """The inverse of `kimi_linear`."""
  mixers, channels = (of_layers(config, x) for x in ("mixers", "channel_mixers"))
  layers = lambda kind: [i + 1 for i, x in enumerate(mixers) if x == kind]
  written: Config = {
    "linear_attn_config": {name: config.pop(theirs) for name, theirs in _OF_KDA.items()}
    | {"full_attn_layers": layers("softmax_attention"), "kda_layers": layers("kda")},
    "qk_nope_head_dim": config.pop("key_width") - config["qk_rope_head_dim"],
    "num_shared_experts": config.pop("shared_width") // config["moe_intermediate_size"],
    "num_key_value_heads": config["num_attention_heads"],
  }
  dense = channels.count("swiglu")
  if channels[:dense] == ["swiglu"] * dense:
    written["first_k_dense_replace"] = dense
  else:
    written["mlp_layer_types"] = ["dense" if x == "swiglu" else "sparse" for x in channels]
  return without(config, "mixers", "channel_mixers") | written


def _sizes(settings: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
  """(heads, their unrotated, rotated and value channels, the width of latents)."""
  options = settings["mixer_options"]["softmax_attention"]
  shared = options["rotary_width"]
  nope = options["head_dim"] - shared
  return options["num_heads"], nope, shared, options["value_head_dim"], options["kv_rank"]


def _queries(settings: Mapping[str, Any]) -> tuple[int, int, int]:
  heads, nope, shared, _, _ = _sizes(settings)
  return heads, nope, shared


def _latents(settings: Mapping[str, Any]) -> tuple[int, int, int]:
  _, _, shared, _, rank = _sizes(settings)
  return 1, rank, shared


def swapped(widths, *, pairs: bool = False) -> list:
  """Both parts of [groups (a + b), D] -> [D, groups (b + a)]; `widths(settings)`: groups, a, b.

  With `pairs` the channels b are in pairs that are next to each other, and here b / 2 apart.
  """

  def view(number: int):
    def of_settings(settings):
      groups, a, b = widths(settings)
      theirs = slice(0, a) if number == 0 else slice(a, a + b)
      ours = slice(b, a + b) if number == 0 else slice(0, b)
      apart = (b // 2, 2) if pairs and number == 1 else ()

      def of(x):
        x = x.reshape(groups, a + b, -1)[:, theirs]
        x = x.reshape(groups, *apart, x.shape[-1]) if apart else x
        return np.moveaxis(x.swapaxes(1, 2) if apart else x, -1, 0)

      def part(x):
        x = x.reshape(x.shape[0], groups, a + b)[..., ours]
        return x.reshape(*x.shape[:2], *apart[::-1]) if apart else x

      return View(of, lambda s: (groups * (a + b), s[0]), part)

    return of_settings

  return [view(0), view(1)]


def _values(settings: Mapping[str, Any]) -> tuple[tuple[int, int], int]:
  heads, nope, _, values, _ = _sizes(settings)
  return (nope, values), heads


_OF_HEADS = View(lambda x: x[0, 0, :, 0], lambda s: (1, 1, *s, 1))  # [1, 1, H, 1] -> [H]


def kda(theirs: str) -> Rows:
  """KDA as a mixer, without the matrices of its decays and gate."""
  return {
    **linears("blocks.kda", theirs, **{f"{x}_proj": f"{x}_proj" for x in "qkvb"}),
    **joined(convolution(f"blocks.kda.{x}_conv", f"{theirs}.{x}_conv1d") for x in "qkv"),
    **norm("blocks.kda.norm", f"{theirs}.o_norm"),
    "blocks.kda.decay_up_proj.bias": Row(f"{theirs}.dt_bias"),
  }


def latent_attention(theirs: str, *, pairs: bool = False) -> Rows:
  """Latent attention as a mixer, without W_o; `pairs` as of `swapped`."""
  ours = "blocks.softmax_attention.latents"
  both = lambda name, widths: [Row(f"{theirs}.{name}", x) for x in swapped(widths, pairs=pairs)]
  return {
    "blocks.softmax_attention.q_proj.kernel": both("q_proj.weight", _queries),
    f"{ours}.q_up_proj.kernel": both("q_b_proj.weight", _queries),
    **linear(f"{ours}.q_down_proj", f"{theirs}.q_a_proj"),
    **norm(f"{ours}.q_norm", f"{theirs}.q_a_layernorm"),
    f"{ours}.kv_down_proj.kernel": both("kv_a_proj_with_mqa.weight", _latents),
    f"{ours}.k_up_proj.kernel": Row(f"{theirs}.kv_b_proj.weight", group(0, _values)),
    f"{ours}.v_up_proj.kernel": Row(f"{theirs}.kv_b_proj.weight", group(1, _values)),
    **norm(f"{ours}.kv_norm", f"{theirs}.kv_a_layernorm"),
  }


_KDA_ROWS: Rows = {
  **linears("blocks.kda", _SELF, o_proj="o_proj", gate_down_proj="g_a_proj"),
  **linears("blocks.kda", _SELF, gate_up_proj="g_b_proj", decay_down_proj="f_a_proj"),
  **linear("blocks.kda.decay_up_proj", f"{_SELF}.f_b_proj"),
  **kda(_SELF),
  "blocks.kda.log_rate": Row(f"{_SELF}.A_log", _OF_HEADS),
}

KIMI_LINEAR = Family(
  name="kimi_linear",
  layout="hf",
  architecture="KimiLinearForCausalLM",
  fields=SIZES
  | {
    "mixers": Field("mixer", (list,)),
    "channel_mixers": Field("channel_mixer", (list,)),
    "rms_norm_eps": number(("norm_eps", f"{_KDA}.norm_eps"), 1e-5),
    "tie_word_embeddings": flag("tie_embeddings", False),
    "hidden_act": Fixed("silu"),
    "intermediate_size": size(f"{_DENSE}.hidden", 9216),
    "linear_head_dim": size(f"{_KDA}.head_dim", 128),
    "linear_num_heads": size(f"{_KDA}.num_heads", 32),
    "linear_conv_kernel_dim": size(f"{_KDA}.conv_size", 4),
    "num_attention_heads": size((f"{ATTENTION}.num_heads", "num_heads"), 32),
    "num_key_value_heads": Same(
      "num_attention_heads", lambda config: config["num_attention_heads"]
    ),
    "model_max_length": size(f"{ATTENTION}.max_length", 1048576),
    "kv_lora_rank": size(f"{ATTENTION}.kv_rank", 512),
    "q_lora_rank": size_or_none(f"{ATTENTION}.q_rank"),
    "qk_rope_head_dim": size(f"{ATTENTION}.rotary_width"),
    "key_width": size(f"{ATTENTION}.head_dim"),
    "qk_head_dim": Same("qk_nope_head_dim + qk_rope_head_dim", lambda config: config["key_width"]),
    "v_head_dim": size(f"{ATTENTION}.value_head_dim", 128),
    "mla_use_nope": Fixed(True),
    "attention_bias": Fixed(False, written=False),
    "attention_dropout": number(f"{ATTENTION}.attention_dropout", 0.0),
    "moe_intermediate_size": size(f"{_MOE}.hidden", 1024),
    "shared_width": size(f"{_MOE}.shared_hidden"),
    "num_experts": size(f"{_MOE}.num_experts", 256),
    "num_experts_per_token": size(f"{_MOE}.experts_per_token", 8),
    "moe_renormalize": flag(f"{_MOE}.normalize_weights", True),
    "routed_scaling_factor": number(f"{_MOE}.weight_scale", 2.446),
    "num_expert_group": size(f"{_MOE}.num_groups", 1),
    "topk_group": size(f"{_MOE}.groups_per_token", 1),
    "moe_router_activation_func": Fixed("sigmoid"),
    "use_grouped_topk": Fixed(True, written=False),
    "moe_layer_freq": Fixed(1, written=False),
    "num_nextn_predict_layers": Fixed(0, written=False),
    **free(
      "of rotations, of which there are none", "rope_parameters", "rope_scaling", "rope_theta"
    ),
    **free("of tensors, which are compared", "head_dim"),
    **free("another way to compute the same", "pretraining_tp"),
    **free("of training", "output_router_logits"),
  },
  constants={
    "norm": "rms",
    "embedding_norm": False,
    f"{_KDA}.gate_bias": False,
    f"{ATTENTION}.positions": "none",
    f"{ATTENTION}.norm_eps": 1e-6,
    f"{_MOE}.router": "sigmoid",
    f"{_MOE}.balance_bias": True,
  },
  rows=TOP
  | norm("blocks.mixer_norm", f"{LAYER}.input_layernorm")
  | norm("blocks.channel_norm", f"{LAYER}.post_attention_layernorm")
  | _KDA_ROWS
  | latent_attention(_SELF)
  | linear("blocks.softmax_attention.o_proj", f"{_SELF}.o_proj")
  | linears("blocks.channel_mixer", f"{LAYER}.mlp", **GATED_MLP)
  | linears("blocks.channel_mixer.shared", f"{_EXPERTS}.shared_experts", **GATED_MLP)
  | linear("blocks.channel_mixer.router", f"{_EXPERTS}.gate")
  | {"blocks.channel_mixer.router_bias": Row(f"{_EXPERTS}.gate.e_score_correction_bias")}
  | experts(_EXPERTS, gate="w1", up="w3", down="w2"),
  normal=kimi_linear,
  written=kimi_linear_written,
  renamed={
    "max_position_embeddings": "model_max_length",
    "n_group": "num_expert_group",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
    "num_local_experts": "num_experts",
  },
  # transformers 5.23 saves the dense layers by the names of the others.
  older_tensors={f"block_sparse_moe.{x}.": f"mlp.{x}." for x in GATED_MLP.values()},
)
