"""Zamba2 (Zyphra 2024), of transformers: Mamba-2, in some layers after blocks that they share.

In a file each shared block is in the first layer that uses it, with the low-rank corrections of all
its layers, which are ours at the layer itself. Steps are clipped as time_step_limit says, as in the
authors' kernels; transformers takes time_step_min as the least.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lnssm_jax.models.shared import AFTER_SHARED, numbers_of_blocks
from lnssm_jax.pretrained.families.fields import (
  Config,
  Field,
  Fixed,
  agree,
  choice,
  count_of_layers,
  flag,
  free,
  number,
  size,
  size_or_none,
  whole,
  without,
)
from lnssm_jax.pretrained.families.hybrids import group, of_layers, pattern
from lnssm_jax.pretrained.families.llama import LAYER, SILU, SIZES, TOP, rotary
from lnssm_jax.pretrained.families.mamba import mamba2, steps, steps_written
from lnssm_jax.pretrained.families.table import (
  QKVO,
  TRANSPOSED,
  Family,
  Row,
  Rows,
  linear,
  linears,
  norm,
)
from lnssm_jax.pretrained.manifest import ExportError

_SHARED = f"mixer_options.{AFTER_SHARED}"
_NAMES = {"mamba": "mamba2", "hybrid": AFTER_SHARED}
_BLOCK, _OWN = "model.shared.{}", f"{LAYER}.own"  # names that `_tensor` replaces
_ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", **SILU}


def _both(name: str) -> tuple[str, str]:
  """An option of Mamba-2 in layers of both kinds."""
  return f"mixer_options.mamba2.{name}", f"{_SHARED}.mixers.mamba2.{name}"


def _normal(config: Config) -> Config:
  config = {"num_hidden_layers": 54, "max_position_embeddings": 4096, "hidden_size": 2560} | config
  L, D = count_of_layers(config), whole(config, "hidden_size")
  types = config.pop("layers_block_type", None)
  if types is None:
    raise ExportError("layers_block_type is missing.")
  if isinstance(types, list):
    types = ["mamba" if x == "linear_attention" else x for x in types]
  if not isinstance(types, list) or len(types) != L or {*map(str, types)} != {*_NAMES}:
    raise ExportError(
      f"layers_block_type={types!r:.80} must be num_hidden_layers={L} of {' and '.join(_NAMES)}."
    )
  uses = [i for i, kind in enumerate(types) if kind == "hybrid"]
  agree(config, "hybrid_layer_ids", uses, "the layers 'hybrid' of layers_block_type")
  blocks = whole(config, "num_mem_blocks", 1)
  if blocks > len(uses):
    raise ExportError(f"num_mem_blocks={blocks} is more than the {len(uses)} layers that use them.")
  # Layers of one place in a pattern have one block.
  of_layer = numbers_of_blocks([_NAMES[x] for x in types], L, blocks)
  kinds = pattern([(_NAMES[x], n) for x, n in zip(types, of_layer, strict=True)])
  H = whole(config, "num_attention_heads", 32)
  if D % H:
    raise ExportError(f"hidden_size={D} is not a multiple of num_attention_heads={H}.")
  for name, value, said in (
    ("attention_hidden_size", 2 * D, "2 hidden_size"),
    ("attention_head_dim", 2 * D // H, "2 hidden_size / num_attention_heads"),
    ("kv_channels", D // H, "hidden_size / num_attention_heads"),
    ("num_query_groups", H, "num_attention_heads"),
  ):
    agree(config, name, value, said)
  inner, heads = whole(config, "mamba_expand", 2) * D, whole(config, "n_mamba_heads", 8)
  config.pop("n_mamba_heads", None)
  if inner % heads:
    raise ExportError(f"n_mamba_heads={heads} does not divide mamba_expand hidden_size = {inner}.")
  agree(config, "mamba_headdim", inner // heads, "mamba_expand hidden_size / n_mamba_heads")
  rank = whole(config, "adapter_rank", 128)
  corrected = config.pop("use_shared_attention_adapter", False)
  if not isinstance(corrected, bool):
    raise ExportError(f"use_shared_attention_adapter={corrected!r:.80} must be bool.")
  usual = {"num_key_value_heads": H, "intermediate_size": 4 * D}
  config |= {name: value for name, value in usual.items() if config.get(name) is None}
  return rotary(steps(config), usual_length=4096) | {
    "mixers": [kind for kind, _ in kinds],
    "mamba_headdim": inner // heads,
    "adapter_rank": rank,
    "attention_rank": rank if corrected else None,
  }


def _written(config: Config) -> Config:
  names = {ours: theirs for theirs, ours in _NAMES.items()}
  types = [names[x] for x in of_layers(config, "mixers")]
  inner = config["mamba_expand"] * config["hidden_size"]
  config = steps_written(config) | {
    "layers_block_type": types,
    "n_mamba_heads": inner // config["mamba_headdim"],
    "use_shared_attention_adapter": config["attention_rank"] is not None,
  }
  return without(config, "mixers", "attention_rank")


def _tensor(settings: Mapping[str, Any], name: str) -> str:
  """The name in a file of a tensor of a shared block, or of a layer's correction."""
  if not (found := re.fullmatch(r"model\.(shared|layers)\.(\d+)\.(own\.)?(.*)", name)):
    return name
  place, number, own, rest = found[1], int(found[2]), found[3], found[4]
  kinds, blocks = settings["mixer"], settings["mixer_options"][AFTER_SHARED]["num_blocks"]
  uses = [i for i in range(settings["num_layers"]) if kinds[i % len(kinds)] == AFTER_SHARED]
  if place == "shared":
    return f"model.layers.{uses[number]}.shared_transformer.{rest}"
  if not own:
    return name
  layers, part = rest.rsplit("_list.", 1)
  use = uses.index(number)
  return f"model.layers.{uses[use % blocks]}.shared_transformer.{layers}_list.{use}.{part}"


def _halves(settings: Mapping[str, Any]) -> tuple[Sequence[int], int]:
  return (settings["mixer_options"][AFTER_SHARED]["hidden"],) * 2, 1


def _corrections() -> Rows:
  """U and V of the block's layers, in the layers that use it."""
  ours, mlp = f"blocks.{AFTER_SHARED}", f"{_OWN}.feed_forward.gate_up_proj_adapter_list"
  rows: Rows = {f"{ours}.mlp_down_proj.kernel": Row(f"{mlp}.0.weight", TRANSPOSED)}
  for n, x in enumerate(("gate", "up")):
    rows[f"{ours}.{x}_up_proj.kernel"] = Row(f"{mlp}.1.weight", group(n, _halves))
  for x in "qkv":
    theirs = f"{_OWN}.self_attn.linear_{x}_adapter_list"
    rows |= linear(f"{ours}.{x}_down_proj", f"{theirs}.0")
    rows |= linear(f"{ours}.{x}_up_proj", f"{theirs}.1")
  return rows


ZAMBA2 = Family(
  name="zamba2",
  layout="hf",
  architecture="Zamba2ForCausalLM",
  fields=SIZES
  | {
    "vocab_size": size("vocab_size", 32000),
    "mixers": Field("mixer", (list,)),
    "rms_norm_eps": number(("norm_eps", f"{_SHARED}.norm_eps"), 1e-5),
    "tie_word_embeddings": Fixed(True),  # else transformers has a block for each layer
    "num_attention_heads": size((f"{_SHARED}.num_heads", "num_heads"), 32),
    "num_key_value_heads": size(f"{_SHARED}.num_kv_heads"),
    "max_position_embeddings": size(f"{_SHARED}.max_length"),
    "attention_dropout": number(f"{_SHARED}.attention_dropout", 0.0),
    "use_mem_rope": choice(f"{_SHARED}.positions", {True: "rotary", False: "none"}, False),
    "rope_theta": number(f"{_SHARED}.rotary_base"),
    "rope_scaling": Fixed(None, written=False),
    "use_long_context": Fixed(False),
    "intermediate_size": size(f"{_SHARED}.hidden"),
    "hidden_act": choice(f"{_SHARED}.activation", _ACTIVATIONS, "gelu"),
    "add_bias_linear": flag((f"{_SHARED}.use_bias", *_both("use_bias")), False),
    "num_mem_blocks": size(f"{_SHARED}.num_blocks", 1),
    "adapter_rank": size(f"{_SHARED}.rank"),
    "attention_rank": size_or_none(f"{_SHARED}.attention_rank"),
    "use_shared_mlp_adapter": Fixed(True, written=False),
    "mamba_d_state": size(_both("state_dim"), 64),
    "mamba_d_conv": size(_both("conv_size"), 4),
    "mamba_expand": size(_both("expand"), 2),
    "mamba_ngroups": size(_both("num_groups"), 1),
    "mamba_headdim": size(_both("head_dim")),
    "use_conv_bias": Fixed(True),
    "min_step": number(_both("min_step")),
    "max_step": Field(_both("max_step"), (float, type(None)), None),
    **free(
      "another way to compute the same", "chunk_size", "use_mamba_kernels", "use_mem_eff_path"
    ),
    **free("of random parameters", "time_step_floor", "time_step_max", "time_step_min"),
  },
  constants={
    "channel_mixer": "none",
    "norm": "rms",
    "embedding_norm": False,
    "tie_embeddings": True,
    **dict.fromkeys(_both("norm_eps"), 1e-5),
  },
  rows={x: row for x, row in TOP.items() if not x.startswith("norm.")}
  | norm("norm", "model.final_layernorm")
  | norm("blocks.mixer_norm", f"{LAYER}.input_layernorm")
  | mamba2("blocks.mamba2", f"{LAYER}.mamba")
  | norm(f"blocks.{AFTER_SHARED}.norm", f"{LAYER}.mamba_decoder.input_layernorm")
  | mamba2(f"blocks.{AFTER_SHARED}.mixer", f"{LAYER}.mamba_decoder.mamba")
  | linear(f"blocks.{AFTER_SHARED}.shared_proj", f"{LAYER}.linear")
  | _corrections()
  | norm("shared.mixer_norm", f"{_BLOCK}.input_layernorm")
  | norm("shared.channel_norm", f"{_BLOCK}.pre_ff_layernorm")
  | linears("shared.mixer", f"{_BLOCK}.self_attn", **QKVO)
  | linear("shared.channel_mixer.down", f"{_BLOCK}.feed_forward.down_proj")
  | {
    f"shared.channel_mixer.{x}.{ours}": Row(
      f"{_BLOCK}.feed_forward.gate_up_proj.{theirs}", group(n, _halves)
    )
    for n, x in enumerate(("gate", "up"))
    for ours, theirs in (("kernel", "weight"), ("bias", "bias"))
  },
  normal=_normal,
  written=_written,
  renamed={"layer_types": "layers_block_type", "head_dim": "attention_head_dim"},
  tensor=_tensor,
)
