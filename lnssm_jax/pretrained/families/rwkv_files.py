"""RWKV-6 and RWKV-7 (World, G1) as their author publishes them: one .pth without a config.json.

Every setting is the shape of a tensor. Matrices of low rank are [in, out] there, as here.
"""

import dataclasses
import re
from collections.abc import Mapping

from lnssm_jax.pretrained.families.fields import Config, number
from lnssm_jax.pretrained.families.rwkv6 import RWKV6
from lnssm_jax.pretrained.families.rwkv7 import RWKV7
from lnssm_jax.pretrained.families.table import (
  TRANSPOSED,
  TWO_AXES,
  Family,
  Row,
  Rows,
  by_heads,
  linears,
  norm,
)
from lnssm_jax.pretrained.manifest import ExportError

_LAYER = "blocks.{}"
_ATT, _FFN = f"{_LAYER}.att", f"{_LAYER}.ffn"
_MIXER, _CHANNEL = "blocks.mixer", "blocks.channel_mixer"
_PROJECTIONS = {"r_proj": "receptance", "k_proj": "key", "v_proj": "value", "o_proj": "output"}
_BOTH: Rows = {
  "embedding": Row("emb.weight"),
  "head.kernel": Row("head.weight", TRANSPOSED),
  **norm("embedding_norm", "blocks.0.ln0"),
  **norm("norm", "ln_out"),
  **norm("blocks.mixer_norm", f"{_LAYER}.ln1"),
  **norm("blocks.channel_norm", f"{_LAYER}.ln2"),
  **norm(f"{_MIXER}.norm", f"{_ATT}.ln_x"),
  **linears(_MIXER, _ATT, **_PROJECTIONS),
}


def _narrow(ours: str, theirs: str, since: int = 0) -> Rows:
  down, up = f"{_MIXER}.{ours}_down_proj.kernel", f"{_MIXER}.{ours}_up_proj.kernel"
  rows = {down: f"{theirs}1", up: f"{theirs}2"}
  return {name: Row(f"{_ATT}.{x}", since=since) for name, x in rows.items()}


def _bias(ours: str, theirs: str, since: int = 0) -> Rows:
  return {f"{_MIXER}.{ours}_up_proj.bias": Row(f"{_ATT}.{theirs}0", TWO_AXES, since=since)}


RWKV7_FILE = dataclasses.replace(
  RWKV7,
  fields=RWKV7.fields
  | {"norm_eps": number("norm_eps"), "group_eps": number("mixer_options.norm_eps")},
  rows=_BOTH
  | {f"{_MIXER}.mu_{x}": Row(f"{_ATT}.x_{x}", TWO_AXES) for x in "rwkvag"}
  | _narrow("decay", "w")
  | _bias("decay", "w")
  | _narrow("rate", "a")
  | _bias("rate", "a")
  | _narrow("value", "v", 1)
  | _bias("value", "v", 1)
  | _narrow("gate", "g")
  | {
    f"{_MIXER}.erase_gain": Row(f"{_ATT}.k_k", TWO_AXES),
    f"{_MIXER}.rate_gain": Row(f"{_ATT}.k_a", TWO_AXES),
    f"{_MIXER}.bonus_gain": Row(f"{_ATT}.r_k", by_heads("rwkv7")),
    f"{_CHANNEL}.mu_k": Row(f"{_FFN}.x_k", TWO_AXES),
  }
  | linears(_CHANNEL, _FFN, up="key", down="value"),
  skipped=r"blocks\.0\.att\.v[012]",  # of values of layers before, of which there are none
)

RWKV6_FILE = dataclasses.replace(
  RWKV6,
  fields=RWKV6.fields | {"g_norm_eps": number("mixer_options.norm_eps")},  # before its factor 64
  rows=_BOTH
  | {f"{_MIXER}.mu_{x}": Row(f"{_ATT}.time_maa_{x}", TWO_AXES) for x in "xwkvrg"}
  | {
    f"{_MIXER}.mix_down_proj.kernel": Row(f"{_ATT}.time_maa_w1"),
    f"{_MIXER}.mix_up": Row(f"{_ATT}.time_maa_w2"),
    f"{_MIXER}.u": Row(f"{_ATT}.time_faaaa", by_heads("rwkv6")),
    f"{_MIXER}.w": Row(f"{_ATT}.time_decay", TWO_AXES),
    f"{_MIXER}.decay_down_proj.kernel": Row(f"{_ATT}.time_decay_w1"),
    f"{_MIXER}.decay_up_proj.kernel": Row(f"{_ATT}.time_decay_w2"),
    f"{_CHANNEL}.mu_k": Row(f"{_FFN}.time_maa_k", TWO_AXES),
    f"{_CHANNEL}.mu_r": Row(f"{_FFN}.time_maa_r", TWO_AXES),
  }
  | linears(_MIXER, _ATT, g_proj="gate")
  | linears(_CHANNEL, _FFN, up="key", gate="receptance", down="value"),
)


def of_tensors(shapes: Mapping[str, tuple[int, ...]]) -> tuple[Family, Config]:
  """The family of a file's tensors, and the config.json that fla has for them.

  Raises:
    ExportError: they are none of RWKV-6 or RWKV-7.
  """
  layers = {int(x[1]) for name in shapes if (x := re.match(r"blocks\.(\d+)\.", name))}
  first = lambda name: shapes[f"blocks.0.att.{name}"]
  both: Config = {"norm_eps": 1e-5, "norm_bias": True, "tie_word_embeddings": False}
  try:
    both["vocab_size"], both["hidden_size"] = shapes["emb.weight"]
    both["num_hidden_layers"] = len(layers)
    both["intermediate_size"] = shapes["blocks.0.ffn.key.weight"][0]
    if "blocks.0.att.r_k" in shapes:
      ranks = {"decay_low_rank_dim": "w1", "a_low_rank_dim": "a1", "gate_low_rank_dim": "g1"}
      config = both | {name: first(tensor)[1] for name, tensor in ranks.items()}
      config["v_low_rank_dim"] = shapes["blocks.1.att.v1"][1] if len(layers) > 1 else 1
      K = first("r_k")[1]
      config |= {"group_eps": 64e-5 / K}  # 64e-5 for any width, before the mixer's factor K
      return RWKV7_FILE, config | {"model_type": "rwkv7", "head_dim": K}
    if "blocks.0.att.time_maa_x" in shapes:
      config = both | {"num_heads": first("time_faaaa")[0]}
      config["expand_k"] = first("key.weight")[0] / both["hidden_size"]
      config["proj_low_rank_dim"] = first("time_maa_w2")[1]
      config["gate_low_rank_dim"] = first("time_decay_w1")[1]
      return RWKV6_FILE, config | {"model_type": "rwkv6"}
  except (LookupError, ValueError) as error:
    raise ExportError(f"it lacks a tensor of RWKV, or one of two axes ({error}).") from None
  raise ExportError(
    "it has neither blocks.0.att.r_k (RWKV-7) nor blocks.0.att.time_maa_x (RWKV-6); other models"
    " are read from safetensors files with a config.json."
  )
