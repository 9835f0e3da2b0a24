"""Hybrids of transformers without experts: Bamba, Qwen3-Next, and Qwen3.5.

Which layers are attention is free: the pattern is the shortest that they repeat, or all of them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lnssm_jax.ops.core.checks import is_number
from lnssm_jax.pretrained.families.fields import (
  Config,
  Field,
  Fixed,
  Same,
  agree,
  choice,
  count_of_layers,
  flag,
  free,
  number,
  number_or_none,
  size,
  whole,
  without,
)
from lnssm_jax.pretrained.families.llama import (
  LAYER,
  SILU,
  SIZES,
  TOP,
  heads,
  rotary,
  rotary_written,
)
from lnssm_jax.pretrained.families.mamba import mamba2, steps, steps_written
from lnssm_jax.pretrained.families.table import (
  GATED_MLP,
  QKVO,
  TRANSPOSED,
  Family,
  Row,
  Rows,
  View,
  joined,
  linear,
  linears,
  norm,
)
from lnssm_jax.pretrained.manifest import ExportError

ATTENTION = "mixer_options.softmax_attention"
_MAMBA, _DELTA = "mixer_options.mamba2", "mixer_options.gated_delta_net"
_FULL, _LINEAR = "full_attention", "linear_attention"
# {kind of a layer in transformers 4: in 5}
BAMBA_NAMES = {"attention": _FULL, "mamba": _LINEAR}

FIELDS = SIZES | {
  "intermediate_size": size("channel_hidden"),
  "num_attention_heads": size((f"{ATTENTION}.num_heads", "num_heads")),
  "num_key_value_heads": size(f"{ATTENTION}.num_kv_heads"),
  "max_position_embeddings": size(f"{ATTENTION}.max_length"),
  "attention_bias": flag(f"{ATTENTION}.use_bias", False),
  "attention_dropout": number(f"{ATTENTION}.attention_dropout", 0.0),
  "rope_theta": number(f"{ATTENTION}.rotary_base"),
  "rope_scaling": Field(f"{ATTENTION}.rotary_scaling", (dict, type(None))),
  "rotary_width": size(f"{ATTENTION}.rotary_width"),
  "head_dim": size((f"{ATTENTION}.head_dim", f"{ATTENTION}.value_head_dim")),
  "tie_word_embeddings": flag("tie_embeddings", False),
  "hidden_act": choice("channel_mixer_options.activation", SILU, "silu"),
  "mixers": Field("mixer", (list,)),
}
CONSTANTS = {"channel_mixer": "swiglu", "embedding_norm": False}


def pattern[Kind](layers: Sequence[Kind]) -> list[Kind]:
  """The shortest pattern that layers repeat."""
  period = lambda n: all(kind == layers[i % n] for i, kind in enumerate(layers))
  return list(layers[: next(n for n in range(1, len(layers) + 1) if period(n))])


def by_pattern(
  config: Config, types: Sequence[Any], recurrent: str | None, share: float, usual_length: int
) -> Config:
  """Writes out the pattern of mixers, the width of the rotation, and the longest sequence.

  Without a recurrent mixer all layers must be attention.
  """
  L, names = whole(config, "num_hidden_layers"), {_FULL: "softmax_attention"}
  names |= {} if recurrent is None else {_LINEAR: recurrent}
  if len(types) != L or set(map(str, types)) != set(names):
    raise ExportError(
      f"layer_types={list(types)!r:.80} must be {' and '.join(names)}, of "
      f"num_hidden_layers={L!r:.80}."
    )
  config.setdefault("max_position_embeddings", usual_length)
  config = rotary(heads(config), usual_length=usual_length)
  share, K = config.pop("partial_rotary_factor", share), config["head_dim"]
  if not is_number(share) or type(K) is not int or not 0 < share <= 1:
    raise ExportError(f"partial_rotary_factor={share!r:.80}, head_dim={K!r:.80} are no sizes.")
  config["rotary_width"] = int(K * share)
  return config | {"mixers": pattern([names[x] for x in types])}


def pattern_written(config: Config, *left_out: str) -> tuple[Config, list[str]]:
  """The inverse of `by_pattern`: (the config without our settings, the kind of each layer)."""
  types = [_FULL if x == "softmax_attention" else _LINEAR for x in of_layers(config, "mixers")]
  config = rotary_written(config) | {
    "partial_rotary_factor": config["rotary_width"] / config["head_dim"]
  }
  return without(config, "mixers", "rotary_width", *left_out), types


def by_layers(config: Config, mixers: Sequence[str], channel_mixers: Sequence[str]) -> Config:
  """`config` with the shortest pattern of both kinds of mixers of all layers."""
  for name, kinds in (("mixers", mixers), ("channel mixers", channel_mixers)):
    if len(set(kinds)) < 2:
      raise ExportError(
        f"all {len(kinds)} layers have one of {name}, {kinds[0]}; only models with two are"
        " implemented."
      )
  first, second = zip(*pattern([*zip(mixers, channel_mixers, strict=True)]), strict=True)
  return config | {"mixers": [*first], "channel_mixers": [*second]}


def of_layers(config: Config, name: str) -> list[str]:
  """The mixers, or channel mixers, of all layers, from their pattern."""
  return [config[name][i % len(config[name])] for i in range(config["num_hidden_layers"])]


def _bamba(config: Config) -> Config:
  indices, L = config.pop("attn_layer_indices", None), count_of_layers(config)
  if not isinstance(indices, list) or any(type(x) is not int or not 0 <= x < L for x in indices):
    raise ExportError(f"attn_layer_indices={indices!r:.80} must be a list, of layers below {L}.")
  types = [_FULL if layer in indices else _LINEAR for layer in range(L)]
  for name in ("layers_block_type", "layer_types"):
    given = config.pop(name, None)
    plain = [BAMBA_NAMES.get(str(x), x) for x in given] if isinstance(given, list) else given
    if plain not in (None, types):
      raise ExportError(
        f"{name}={given!r:.80} is not what attn_layer_indices={indices!r:.80} says; correct the "
        "one that is wrong."
      )
  config.setdefault("num_key_value_heads", 8)
  agree(dict(config), "partial_rotary_factor", 0.5, "the share of transformers")
  return bamba_sizes(config, types, 0.5, 262144)


def bamba_sizes(config: Config, types: Sequence[Any], share: float, usual_length: int) -> Config:
  """As `by_pattern`, of Mamba-2, whose sizes and steps it writes out, and attention of D / H."""
  config = steps(by_pattern(config, types, "mamba2", share, usual_length))
  K, D, H = config.pop("head_dim"), config["hidden_size"], config["num_attention_heads"]
  if K != D / H:
    raise ExportError(f"head_dim={K!r:.80} must be hidden_size / num_attention_heads = {D / H:g}.")
  expand, count = whole(config, "mamba_expand", 2), whole(config, "mamba_n_heads", 128)
  inner, width = expand * D, config.get("mamba_d_head", "auto")
  if width not in ("auto", inner / count) or inner % count:
    raise ExportError(
      f"mamba_n_heads={count} mamba_d_head={width!r:.80} is not mamba_expand hidden_size = {inner}."
    )
  config.pop("mamba_n_heads", None)
  return config | {"mamba_d_head": inner // count}


def bamba_sizes_written(config: Config) -> tuple[Config, list[str]]:
  """The inverse of `bamba_sizes`, as `pattern_written`."""
  heads_of_layer = config["mamba_expand"] * config["hidden_size"] // config["mamba_d_head"]
  K = config["hidden_size"] // config["num_attention_heads"]
  config, types = pattern_written(
    config | {"head_dim": K, "mamba_n_heads": heads_of_layer}, "head_dim"
  )
  return steps_written(config), types


def _bamba_written(config: Config) -> Config:
  config, types = bamba_sizes_written(config)
  return config | {"attn_layer_indices": [i for i, x in enumerate(types) if x == _FULL]}


BAMBA = Family(
  name="bamba",
  layout="hf",
  architecture="BambaForCausalLM",
  fields=without(FIELDS, "head_dim")
  | {
    "rms_norm_eps": number(("norm_eps", f"{_MAMBA}.norm_eps"), 1e-5),
    "mlp_bias": flag("channel_mixer_options.use_bias", False),
    "mamba_d_head": size(f"{_MAMBA}.head_dim"),
    "mamba_n_groups": size(f"{_MAMBA}.num_groups", 1),
    "mamba_d_state": size(f"{_MAMBA}.state_dim", 256),
    "mamba_d_conv": size(f"{_MAMBA}.conv_size", 4),
    "mamba_expand": size(f"{_MAMBA}.expand", 2),
    "mamba_conv_bias": flag(f"{_MAMBA}.conv_bias", True),
    "mamba_proj_bias": flag(f"{_MAMBA}.use_bias", False),
    "min_step": number(f"{_MAMBA}.min_step"),
    "max_step": number_or_none(f"{_MAMBA}.max_step"),
    "attn_rotary_emb": Same("head_dim / 2", lambda config: config["rotary_width"]),
    **free("another way to compute the same", "mamba_chunk_size"),
    **free("of training", "z_loss_coefficient"),
    **free("of random parameters", "time_step_floor", "time_step_max", "time_step_min"),
  },
  constants={"norm": "rms", **CONSTANTS},
  rows=TOP
  | norm("norm", "model.final_layernorm")
  | norm("blocks.mixer_norm", f"{LAYER}.input_layernorm")
  | norm("blocks.channel_norm", f"{LAYER}.pre_ff_layernorm")
  | linears("blocks.channel_mixer", f"{LAYER}.feed_forward", **GATED_MLP)
  | linears("blocks.softmax_attention", f"{LAYER}.self_attn", **QKVO)
  | mamba2("blocks.mamba2", f"{LAYER}.mamba"),
  normal=_bamba,
  written=_bamba_written,
)


# (rows of one after another in a group: of which ours are one, groups)
type Widths = Callable[[Mapping[str, Any]], tuple[Sequence[int], int]]


def group(number: int, widths: Widths) -> Callable[[Mapping[str, Any]], View]:
  """[groups sum(widths), D] or [groups sum(widths)] -> the rows `number` of each group.

  Ours, [D, groups width] or [groups width], has the groups next to each other.
  """

  def view(settings):
    sizes, groups = widths(settings)
    begin, total = sum(sizes[:number]), sum(sizes)

    def of(x):
      rows = x.reshape(groups, total, *x.shape[1:])[:, begin : begin + sizes[number]]
      return rows if x.ndim == 1 else np.moveaxis(rows, -1, 0)

    shape = lambda s: (groups * total, *s[:-2])
    return View(of, shape, lambda x: x.reshape(*x.shape[:-1], groups, -1))

  return view


def _delta(settings: Mapping[str, Any]) -> tuple[int, int, int, int]:
  """(key heads, K, value heads, V) of the delta layers."""
  options = settings["mixer_options"]["gated_delta_net"]
  K = options["head_dim"]
  return options["num_heads"], K, options["num_value_heads"], round(options["expand_v"] * K)


def _qkvz(settings: Mapping[str, Any]) -> tuple[Sequence[int], int]:
  H, K, values, V = _delta(settings)
  return (K, K, values * V // H, values * V // H), H


def _qkv(settings: Mapping[str, Any]) -> tuple[Sequence[int], int]:
  H, K, values, V = _delta(settings)
  return (H * K, H * K, values * V), 1


def _ba(settings: Mapping[str, Any]) -> tuple[Sequence[int], int]:
  H, _, values, _ = _delta(settings)
  return (values // H, values // H), H


def _query_and_gate(settings: Mapping[str, Any]) -> tuple[Sequence[int], int]:
  options = settings["mixer_options"]["softmax_attention"]
  return (options["head_dim"], options["head_dim"]), options["num_heads"]


def _convolved(number: int) -> Callable[[Mapping[str, Any]], View]:
  """[channels of q, k and v, 1, W] -> [W, those of one]."""

  def view(settings):
    sizes, _ = _qkv(settings)
    begin = sum(sizes[:number])
    return View(lambda x: x[begin : begin + sizes[number], 0].T, lambda s: (sum(sizes), 1, s[0]))

  return view


_NET, _SELF = f"{LAYER}.linear_attn", f"{LAYER}.self_attn"
_NEXT_INPUTS: Rows = {
  **{
    f"blocks.gated_delta_net.{x}_proj.kernel": Row(f"{_NET}.in_proj_qkvz.weight", group(n, _qkvz))
    for n, x in enumerate("qkvg")
  },
  **{
    f"blocks.gated_delta_net.{x}_proj.kernel": Row(f"{_NET}.in_proj_ba.weight", group(n, _ba))
    for n, x in enumerate("ba")
  },
}
_INPUTS: Rows = {  # of Qwen3.5
  **{
    f"blocks.gated_delta_net.{x}_proj.kernel": Row(f"{_NET}.in_proj_qkv.weight", group(n, _qkv))
    for n, x in enumerate("qkv")
  },
  **{
    f"blocks.gated_delta_net.{ours}_proj.kernel": Row(f"{_NET}.in_proj_{x}.weight", TRANSPOSED)
    for ours, x in (("g", "z"), ("b", "b"), ("a", "a"))
  },
}
_NEXT_ROWS: Rows = {
  **{
    f"blocks.gated_delta_net.{x}_conv.kernel": Row(f"{_NET}.conv1d.weight", _convolved(n))
    for n, x in enumerate("qkv")
  },
  **{
    f"blocks.softmax_attention.{x}_proj.{ours}": Row(
      f"{_SELF}.q_proj.{theirs}", group(n, _query_and_gate)
    )
    for n, x in enumerate("qg")
    for ours, theirs in (("kernel", "weight"), ("bias", "bias"))
  },
  "blocks.gated_delta_net.a_proj.bias": Row(f"{_NET}.dt_bias"),
  "blocks.gated_delta_net.log_rate": Row(f"{_NET}.A_log"),
  "blocks.gated_delta_net.o_proj.kernel": Row(f"{_NET}.out_proj.weight", TRANSPOSED),
  **norm("blocks.gated_delta_net.norm", f"{_NET}.norm"),
  **joined(linear(f"blocks.softmax_attention.{x}", f"{_SELF}.{x}") for x in list(QKVO)[1:]),
  **norm("blocks.softmax_attention.q_norm", f"{_SELF}.q_norm"),
  **norm("blocks.softmax_attention.k_norm", f"{_SELF}.k_norm"),
}

# Of layers with experts, of which there are none.
_EXPERTS = (
  "moe_intermediate_size",
  "shared_expert_intermediate_size",
  "num_experts_per_tok",
  "norm_topk_prob",
  "output_router_logits",
  "router_aux_loss_coef",
)


def _qwen3_next(config: Config) -> Config:
  config = _without_experts(config)
  return delta_hybrid(config, num_key_value_heads=2)


def _without_experts(config: Config) -> Config:
  L, experts = count_of_layers(config), config.pop("num_experts", 512)
  dense, every = config.pop("mlp_only_layers", None) or [], config.pop("decoder_sparse_step", 1)
  if not isinstance(dense, list):
    raise ExportError(f"mlp_only_layers={dense!r:.80} must be a list.")
  whole_step = type(every) is int and every > 0
  sparse = [i for i in range(L) if i not in dense and whole_step and (i + 1) % every == 0]
  if type(experts) is not int or not whole_step or (experts > 0 and sparse):
    raise ExportError(
      f"num_experts={experts!r:.80}, decoder_sparse_step={every!r:.80}: layers with experts next "
      "to others without are not implemented; only num_experts=0, or experts in all layers."
    )
  return config


def delta_hybrid(config: Config, **defaults: int) -> Config:
  """Writes out what follows from other settings of Qwen3-Next and Qwen3.5."""
  L, config = count_of_layers(config), defaults | config
  interval = config.pop("full_attention_interval", None)
  types = config.pop("layer_types", None)
  if interval is not None or types is None:
    every = whole({"full_attention_interval": interval or 4}, "full_attention_interval")
    usual = [_LINEAR if (i + 1) % every else _FULL for i in range(L)]
    types = usual if types is None else types
    if interval is not None and types != usual:
      raise ExportError(
        f"full_attention_interval={interval} is not what layer_types={types!r:.80} says; correct "
        "the one that is wrong."
      )
  if not isinstance(types, list):
    raise ExportError(f"layer_types={types!r:.80} must be a list.")
  config.setdefault("head_dim", 256)
  config = by_pattern(config, types, "gated_delta_net", 0.25, 32768)
  K = whole(config, "linear_key_head_dim", 128)
  V = whole(config, "linear_value_head_dim", 128)
  return without(config, "linear_value_head_dim") | {"linear_key_head_dim": K, "expand_v": V / K}


def qwen3_next_written(config: Config) -> Config:
  """The inverse of `delta_hybrid`, without experts."""
  V = round(config["expand_v"] * config["linear_key_head_dim"])
  config, types = pattern_written(config, "expand_v")
  return config | {"linear_value_head_dim": V, "layer_types": types, "num_experts": 0}


QWEN3_NEXT = Family(
  name="qwen3_next",
  layout="hf",
  architecture="Qwen3NextForCausalLM",
  fields=FIELDS
  | {
    "rms_norm_eps": number(("norm_eps", f"{_DELTA}.norm_eps", f"{ATTENTION}.norm_eps"), 1e-6),
    "linear_key_head_dim": size(f"{_DELTA}.head_dim"),
    "linear_num_key_heads": size(f"{_DELTA}.num_heads", 16),
    "linear_num_value_heads": size(f"{_DELTA}.num_value_heads", 32),
    "linear_conv_kernel_dim": size(f"{_DELTA}.conv_size", 4),
    "expand_v": number(f"{_DELTA}.expand_v"),
    "use_sliding_window": Fixed(False, written=False),
    **free("of a window, which is not used", "max_window_layers", "sliding_window"),
    **free("of experts, of which there are none", *_EXPERTS),
  },
  constants={
    "norm": "rms_from_zero",
    f"{ATTENTION}.qk_norm": "rms_from_zero",
    f"{ATTENTION}.use_gate": True,
    **CONSTANTS,
  },
  rows=TOP
  | norm("blocks.mixer_norm", f"{LAYER}.input_layernorm")
  | norm("blocks.channel_norm", f"{LAYER}.post_attention_layernorm")
  | linears("blocks.channel_mixer", f"{LAYER}.mlp", **GATED_MLP)
  | _NEXT_INPUTS
  | _NEXT_ROWS,
  normal=_qwen3_next,
  written=qwen3_next_written,
)

# Of three coordinates of a position; those of a text are equal.
_COORDINATES = ("mrope_interleaved", "mrope_section")
OF_FURTHER_TOKENS = free(
  "of heads that predict further tokens, which are left out",
  "mtp_num_hidden_layers",
  "mtp_use_dedicated_embeddings",
)
OF_IMAGES = free(
  "of images and videos, whose encoder is left out",
  "image_token_id",
  "language_model_only",
  "video_token_id",
  "vision_config",
  "vision_end_token_id",
  "vision_start_token_id",
)


def qwen3_5(config: Config, *, groups: int = 4) -> Config:
  """As `delta_hybrid`, without the coordinates of images; `groups` of keys where not given."""
  for name in ("rope_parameters", "rope_scaling"):
    if isinstance(rope := config.get(name), dict):
      config[name] = without(rope, *_COORDINATES)
  return delta_hybrid(config, num_key_value_heads=groups)


def qwen3_5_written(config: Config) -> Config:
  """The inverse of `qwen3_5`."""
  experts = {name: config[name] for name in ("num_experts",) if name in config}
  return without(qwen3_next_written(config), "num_experts") | experts


_ONLY_NEXT = ("use_sliding_window", "max_window_layers", "sliding_window", *_EXPERTS)
QWEN3_5_TEXT = Family(
  name="qwen3_5_text",
  layout="hf",
  architecture="Qwen3_5ForCausalLM",
  fields=without(QWEN3_NEXT.fields, *_ONLY_NEXT)
  | {
    "attn_output_gate": Fixed(True, written=False),
    "mlp_only_layers": Fixed([], written=False),
    **free("another way to compute the same", "mamba_ssm_dtype"),
    **OF_FURTHER_TOKENS,
  },
  constants=QWEN3_NEXT.constants,
  rows=without(QWEN3_NEXT.rows, *_NEXT_INPUTS) | _INPUTS,
  normal=qwen3_5,
  written=qwen3_5_written,
  skipped=r"mtp\..*",
)


def nested(config: Config, name: str) -> Config:
  """The config of the text model, of `model_type` `name`, in that of one of text and images."""
  text = config.pop("text_config", None)
  if not isinstance(text, dict) or text.get("model_type") != name:
    raise ExportError(f"text_config={text!r:.80} must be an object with model_type={name!r}.")
  agree(config, "tie_word_embeddings", text.get("tie_word_embeddings", False), "text_config.that")
  for setting in config.keys() & text.keys() - {"model_type"}:
    agree(config, setting, text[setting], f"text_config.{setting}")
  return config | text


def nested_written(config: Config, name: str) -> Config:
  """The inverse of `nested`."""
  outside = {setting: config.pop(setting) for setting in ("architectures", "model_type")}
  text = {"model_type": name} | qwen3_5_written(config)
  return outside | {
    "text_config": text,
    "tie_word_embeddings": text["tie_word_embeddings"],
  }


def of_text_model(rows: Rows) -> Rows:
  """Rows of a text model as they are in one of text and images."""
  return {
    name: row._replace(theirs=row.theirs.replace("model.", "model.language_model.", 1))
    for name, row in rows.items()
    if isinstance(row, Row)
  }


QWEN3_5 = dataclasses.replace(
  QWEN3_5_TEXT,
  name="qwen3_5",
  architecture="Qwen3_5ForConditionalGeneration",
  fields=QWEN3_5_TEXT.fields | OF_IMAGES,
  rows=of_text_model(QWEN3_5_TEXT.rows),
  normal=lambda config: qwen3_5(nested(config, QWEN3_5_TEXT.name)),
  written=lambda config: nested_written(config, QWEN3_5_TEXT.name),
  skipped=r"(mtp|model\.visual)\..*",
)
