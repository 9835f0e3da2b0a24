"""Every mixer, tiny: how the tests build it, and its transcription from the equations."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import MIXERS
from tests.mixers import (
  plain_delta_net,
  plain_gateloop,
  plain_gfw,
  plain_griffin,
  plain_gsa,
  plain_hgrn,
  plain_kernel_attention,
  plain_linear_attention,
  plain_lln,
  plain_long_convolutions,
  plain_longhorn,
  plain_mamba,
  plain_metala,
  plain_positional_attention,
  plain_qlstm,
  plain_rwkv,
  plain_softmax_attention,
  plain_state_spaces,
  plain_tnl,
)
from tests.mixers.plain_lnssm import float64_params, plain_lnssm, split

DIM = 8


@dataclasses.dataclass(frozen=True)
class Tiny:
  """A mixer of width DIM.

  `plain(params, x [T, D], **plain_options)` is its transcription in float64. With `cache` its state
  holds inputs of its past as they were, in its `dtype`.
  """

  plain: Callable[..., np.ndarray]
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  plain_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  cache: bool = False

  @property
  def model_options(self) -> dict[str, Any]:
    """What a `LanguageModel` takes as `mixer_options`: without what it sets itself."""
    return {name: value for name, value in self.options.items() if name != "num_heads"}


HEADS = {"num_heads": 2}

TINY = {
  "base_conv": Tiny(plain_long_convolutions.base_conv, {"max_length": 24}, {"max_length": 24}),
  "based": Tiny(plain_kernel_attention.based, HEADS | {"key_dim": 3}, HEADS),
  "cosformer": Tiny(
    plain_positional_attention.cosformer, HEADS | {"max_length": 40}, HEADS | {"max_length": 40}
  ),
  "delta_net": Tiny(plain_delta_net.delta_net, HEADS, HEADS),
  "dss": Tiny(plain_state_spaces.dss, {"state_dim": 3}),
  "gated_delta_net": Tiny(plain_delta_net.gated_delta_net, HEADS, HEADS),
  "gateloop": Tiny(plain_gateloop.gateloop, HEADS, HEADS),
  "gfw": Tiny(plain_gfw.gfw, HEADS | {"key_dim": 3}, HEADS),
  "gla": Tiny(plain_linear_attention.gla, HEADS | {"gate_rank": 3}, HEADS),
  "gsa": Tiny(plain_gsa.gsa, HEADS | {"num_slots": 3}, HEADS),
  "hgrn": Tiny(plain_hgrn.hgrn),
  "hgrn2": Tiny(plain_hgrn.hgrn2, HEADS, HEADS),
  "hyena": Tiny(
    plain_long_convolutions.hyena,
    {"max_length": 24, "filter_dim": 4},
    {"max_length": 24},
  ),
  "linear_attention": Tiny(plain_kernel_attention.linear_attention, HEADS, HEADS),
  "lln": Tiny(plain_lln.lln, HEADS, HEADS, cache=True),
  "lnssm": Tiny(plain_lnssm, HEADS, HEADS),
  "longhorn": Tiny(plain_longhorn.longhorn, {"state_dim": 3}),
  "longhorn_exact": Tiny(plain_longhorn.longhorn_exact, {"state_dim": 3}),
  "lrn": Tiny(plain_hgrn.lrn),
  "lrpe": Tiny(plain_positional_attention.lrpe, HEADS, HEADS),
  "mamba": Tiny(plain_mamba.mamba, {"state_dim": 3, "step_rank": 2}),
  "mamba2": Tiny(plain_mamba.mamba2, {"state_dim": 3, "head_dim": 4}, {"head_dim": 4}),
  "metala": Tiny(plain_metala.metala, HEADS, HEADS),
  "normalized_attention": Tiny(plain_kernel_attention.normalized_attention, HEADS, HEADS),
  "qlstm": Tiny(plain_qlstm.qlstm),
  "qlstm_reversed": Tiny(plain_qlstm.qlstm),
  "rg_lru": Tiny(plain_griffin.rg_lru, HEADS),
  "retnet": Tiny(plain_linear_attention.retnet, HEADS, HEADS),
  "rwkv4": Tiny(plain_rwkv.rwkv4),
  "rwkv5": Tiny(plain_rwkv.rwkv5, HEADS, HEADS),
  "rwkv6": Tiny(plain_rwkv.rwkv6, HEADS | {"mix_rank": 2, "decay_rank": 3}, HEADS),
  "s4": Tiny(plain_state_spaces.s4, {"state_dim": 4}),
  "s4d": Tiny(plain_state_spaces.s4d, {"state_dim": 4}),
  "s5": Tiny(plain_state_spaces.s5, {"state_dim": 8, "num_blocks": 2}),
  "sliding_window_attention": Tiny(
    plain_softmax_attention.softmax_attention,
    HEADS | {"window": 5},
    HEADS | {"window": 5},
    cache=True,
  ),
  "softmax_attention": Tiny(
    plain_softmax_attention.softmax_attention, HEADS | {"max_length": 32}, HEADS, cache=True
  ),
  "tnl": Tiny(plain_tnl.tnl, HEADS, HEADS),
  "tnn": Tiny(
    plain_long_convolutions.tnn,
    {"max_length": 24, "decay": 0.9, "filter_dim": 4},
    {"max_length": 24, "decay": 0.9},
  ),
}


# One of each family is tested in full in every run. Its siblings share scan, state and most of the
# code with it; what they do not share, their own tests and the tests of all mixers cover.
SIBLINGS = (
  "base_conv",
  "based",
  "dss",
  "gated_delta_net",
  "gateloop",
  "gfw",
  "gla",
  "hgrn2",
  "longhorn_exact",
  "lrn",
  "lrpe",
  "mamba",
  "normalized_attention",
  "qlstm",
  "qlstm_reversed",
  "rwkv5",
  "rwkv6",
  "s4",
  "s5",
  "sliding_window_attention",
)


def one_of_each_family():
  """The names of all mixers, for a test; those of siblings are slow."""
  return [pytest.param(name, marks=[pytest.mark.slow] * (name in SIBLINGS)) for name in MIXERS]


def initial(name: str, **options):
  """The mixer as it starts, in the second of three layers if it asks."""
  place = {}
  if "layer" in MIXERS[name].__init__.__annotations__:
    place = {"layer": 1, "num_layers": 3}
  return MIXERS[name](DIM, **place, **TINY[name].options, **options, rngs=nnx.Rngs(0))


def randomized(name: str, **options):
  """The mixer with no parameter at its initial value."""
  graphdef, params = split(initial(name, **options))
  leaves, structure = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(0), len(leaves))

  def disturb(value, key):
    size = 0.2 if value.ndim == 1 else DIM**-0.5
    return (value + size * jax.random.normal(key, value.shape)).astype(value.dtype)

  return nnx.merge(graphdef, jax.tree.unflatten(structure, map(disturb, leaves, keys)))


def expected(name: str, mixer, x) -> np.ndarray:
  """The transcription's output [B, T, D] for x [B, T, D]."""
  tiny, params = TINY[name], float64_params(mixer)
  return np.stack([tiny.plain(params, np.float64(row), **tiny.plain_options) for row in x])


def inputs(B: int, T: int, *, seed: int = 1) -> jax.Array:
  """x [B, T, DIM] float32, normal."""
  return jax.random.normal(jax.random.key(seed), (B, T, DIM), jnp.float32)
