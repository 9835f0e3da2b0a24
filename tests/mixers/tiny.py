"""Every mixer at a tiny size, with its reference in float64."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import MIXERS
from tests.mixers.helpers import drawn, float64_params, split
from tests.mixers.references import (
  delta_net,
  gateloop,
  gfw,
  griffin,
  gsa,
  hgrn,
  kernel_attention,
  lcsm,
  linear_attention,
  lln,
  lnssm,
  log_linear,
  long_convolutions,
  longhorn,
  mamba,
  mamba3,
  metala,
  mlstm,
  positional_attention,
  qlstm,
  rwkv,
  softmax_attention,
  sparse_state_expansion,
  state_spaces,
  tnl,
)

DIM = 8


@dataclasses.dataclass(frozen=True)
class Tiny:
  """A mixer of width DIM.

  `reference(params, x [T, D], **reference_options)` computes its output in float64 from its
  equations. With `cache` its state holds past inputs in the mixer's `dtype`.
  """

  reference: Callable[..., np.ndarray]
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  reference_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  cache: bool = False

  @property
  def model_options(self) -> dict[str, Any]:
    """The `mixer_options` of a `LanguageModel`: without the arguments that it sets itself."""
    return {name: value for name, value in self.options.items() if name != "num_heads"}


HEADS = {"num_heads": 2}

TINY = {
  "base_conv": Tiny(long_convolutions.base_conv, {"max_length": 24}, {"max_length": 24}),
  "based": Tiny(kernel_attention.based, HEADS | {"head_dim": 3}, HEADS),
  "comba": Tiny(delta_net.comba, HEADS, HEADS),
  "cosformer": Tiny(
    positional_attention.cosformer, HEADS | {"max_length": 40}, HEADS | {"max_length": 40}
  ),
  "delta_net": Tiny(delta_net.delta_net, HEADS, HEADS),
  "delta_product": Tiny(delta_net.delta_product, HEADS, HEADS),
  "dss": Tiny(state_spaces.dss, {"state_dim": 3}),
  "gated_delta_net": Tiny(delta_net.gated_delta_net, HEADS, HEADS),
  "gated_delta_net2": Tiny(delta_net.gated_delta_net2, HEADS | {"gate_rank": 3}, HEADS),
  "gateloop": Tiny(gateloop.gateloop, HEADS, HEADS),
  "gfw": Tiny(gfw.gfw, HEADS | {"head_dim": 3}, HEADS),
  "gla": Tiny(linear_attention.gla, HEADS | {"gate_rank": 3}, HEADS),
  "gsa": Tiny(gsa.gsa, HEADS | {"num_slots": 3}, HEADS),
  "hgrn": Tiny(hgrn.hgrn),
  "hgrn2": Tiny(hgrn.hgrn2, HEADS, HEADS),
  "hyena": Tiny(
    long_convolutions.hyena,
    {"max_length": 24, "filter_dim": 4},
    {"max_length": 24},
  ),
  "kda": Tiny(delta_net.kda, HEADS | {"gate_rank": 3}, HEADS),
  "lcsm": Tiny(lcsm.lcsm, {"state_dim": 3}),
  "linear_attention": Tiny(kernel_attention.linear_attention, HEADS, HEADS),
  "lln": Tiny(lln.lln, HEADS, HEADS, cache=True),
  "lnssm": Tiny(lnssm.lnssm, HEADS, HEADS),
  "log_linear": Tiny(
    log_linear.log_linear, {"state_dim": 3, "head_dim": 4, "max_length": 32}, {"head_dim": 4}
  ),
  "longhorn": Tiny(longhorn.longhorn, {"state_dim": 3}),
  "longhorn_exact": Tiny(longhorn.longhorn_exact, {"state_dim": 3}),
  "lrn": Tiny(hgrn.lrn),
  "lrpe": Tiny(positional_attention.lrpe, HEADS, HEADS),
  "mamba": Tiny(mamba.mamba, {"state_dim": 3, "gate_rank": 2}),
  "mamba2": Tiny(mamba.mamba2, {"state_dim": 3, "head_dim": 4}, {"head_dim": 4}),
  "mamba3": Tiny(mamba3.mamba3, {"state_dim": 4, "head_dim": 4}, {"state_dim": 4, "head_dim": 4}),
  "metala": Tiny(metala.metala, HEADS, HEADS),
  "mlstm": Tiny(mlstm.mlstm, HEADS, HEADS),
  "mom": Tiny(
    sparse_state_expansion.mom, HEADS | {"num_memories": 3, "gate_rank": 3, "method": "mask"}, HEADS
  ),
  "normalized_attention": Tiny(kernel_attention.normalized_attention, HEADS, HEADS),
  "qlstm": Tiny(qlstm.qlstm),
  "qlstm_reversed": Tiny(qlstm.qlstm),
  "rg_lru": Tiny(griffin.rg_lru, HEADS),
  "retnet": Tiny(linear_attention.retnet, HEADS, HEADS),
  "rwkv4": Tiny(rwkv.rwkv4),
  "rwkv5": Tiny(rwkv.rwkv5, HEADS, HEADS),
  "rwkv6": Tiny(rwkv.rwkv6, HEADS | {"mix_rank": 2, "gate_rank": 3}, HEADS),
  "rwkv7": Tiny(rwkv.rwkv7, HEADS | {"decay_rank": 3, "rate_rank": 2, "gate_rank": 4}, HEADS),
  "s4": Tiny(state_spaces.s4, {"state_dim": 4}),
  "s4d": Tiny(state_spaces.s4d, {"state_dim": 4}),
  "s6": Tiny(mamba.s6, {"state_dim": 3, "gate_rank": 2}),
  "ssd": Tiny(mamba.ssd, {"state_dim": 3}),
  "s5": Tiny(state_spaces.s5, {"state_dim": 8, "num_blocks": 2}),
  "short_conv": Tiny(long_convolutions.short_conv),
  "sliding_window_attention": Tiny(
    softmax_attention.softmax_attention,
    HEADS | {"window": 5},
    HEADS | {"window": 5},
    cache=True,
  ),
  "softmax_attention": Tiny(
    softmax_attention.softmax_attention, HEADS | {"max_length": 32}, HEADS, cache=True
  ),
  "sse": Tiny(
    sparse_state_expansion.sse,
    HEADS | {"num_partitions": 3, "lora_rank": 3, "gate_rank": 3, "method": "mask"},
    HEADS,
  ),
  "tnl": Tiny(tnl.tnl, HEADS, HEADS),
  "tnn": Tiny(
    long_convolutions.tnn,
    {"max_length": 24, "decay": 0.9, "filter_dim": 4},
    {"max_length": 24, "decay": 0.9},
  ),
}


# One mixer per op and kind of state runs every test by default. The others share the op, the state
# and most of the code with one of these; `make test-all` runs them too.
CORE = (
  "base_conv",  # a cache of inputs
  "gated_delta_net",  # delta_rule, three convolutions
  "hgrn",  # diagonal_scan, complex
  "lln",  # several states, softmax in blocks
  "lnssm",  # linear_attention with a normalizer, token shift
  "longhorn",  # longhorn_scan, convolution
  "mamba",  # selective_scan, convolution
  "retnet",  # linear_attention, position
  "rg_lru",  # diagonal_scan, first tokens
  "rwkv4",  # wkv4
  "s4d",  # long_convolution by exponentials
  "softmax_attention",  # a cache of keys and values
)


def core_mixers():
  """The names of all mixers, for a test; those outside `CORE` are slow."""
  return [pytest.param(name, marks=[pytest.mark.slow] * (name not in CORE)) for name in MIXERS]


def initial(name: str, **options):
  """The mixer as it starts, in the second of three layers if it has depth."""
  cls = MIXERS[name]
  place = {"layer": 1, "num_layers": 3} if "layer" in cls.set_by_model else {}
  return cls(DIM, **place, **TINY[name].options, **options, rngs=nnx.Rngs(0))


@functools.cache
def starting(name: str):
  """`initial`, run step by step: mixers share these small programs, but not one of the whole."""
  return initial(name)


def randomized(name: str, **options):
  """The mixer with no parameter at its initial value; of the options, `dtype` changes none."""
  graphdef, params = split(starting(name))
  if options:
    graphdef = split(jax.eval_shape(lambda: initial(name, **options)))[0]
  return nnx.merge(graphdef, with_noise(params))


def disturbed(build):
  """(the layer that `build` makes, no parameter at its initial value; these in float64)."""
  layer = drawn(build)
  return layer, float64_params(layer)


def with_noise(params):
  """Parameters near these, none of them equal."""
  random = np.random.default_rng(0)

  def disturb(value):
    size = 0.2 if value.ndim == 1 else DIM**-0.5
    noise = size * random.normal(size=value.shape)
    return jnp.asarray(np.asarray(value, np.float32) + noise, value.dtype)

  return jax.tree.map(disturb, params)


def expected(name: str, mixer, x) -> np.ndarray:
  """The reference's output [B, T, D] for x [B, T, D]."""
  tiny, params = TINY[name], float64_params(mixer)
  return np.stack([tiny.reference(params, np.float64(row), **tiny.reference_options) for row in x])


def inputs(B: int, T: int, *, seed: int = 1) -> jax.Array:
  """x [B, T, DIM] float32, normal."""
  return jax.random.normal(jax.random.key(seed), (B, T, DIM), jnp.float32)
