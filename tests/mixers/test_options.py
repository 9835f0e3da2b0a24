"""Options of mixers whose published code is not recorded in tests/peers, against float64."""

import functools

import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import (
  DSS,
  GLA,
  HGRN,
  HGRN2,
  QLSTM,
  RWKV5,
  RWKV6,
  S5,
  Hyena,
  QLSTMReversed,
)
from tests.devices import result_of
from tests.mixers.helpers import apply, relative_error
from tests.mixers.references import (
  hgrn,
  linear_attention,
  long_convolutions,
  qlstm,
  rwkv,
  state_spaces,
)
from tests.mixers.tiny import DIM, disturbed, inputs

HEADS = {"num_heads": 2}
LAYER = {"layer": 1, "num_layers": 3}
LENGTH = {"max_length": 9}

# The class, its options, the reference.
CASES = {
  "gla of Longhorn's experiments": (
    GLA,
    HEADS | {"gate_rank": 3, "norm": "layer", "norm_scale": False, "gate_bias": True},
    functools.partial(linear_attention.gla, **HEADS),
  ),
  "dss, two steps": (
    DSS,
    {"state_dim": 3, "separate_steps": True},
    state_spaces.dss,
  ),
  "hgrn, output bias": (HGRN, LAYER | {"output_bias": True}, hgrn.hgrn),
  "hgrn2, output bias": (
    HGRN2,
    HEADS | LAYER | {"output_bias": True},
    functools.partial(hgrn.hgrn2, **HEADS),
  ),
  "hyena, biases": (
    Hyena,
    LENGTH | {"filter_dim": 4, "use_bias": True},
    functools.partial(long_convolutions.hyena, **LENGTH),
  ),
  "hyena, order": (
    Hyena,
    LENGTH | {"filter_dim": 4, "order": 4},
    functools.partial(long_convolutions.hyena, **LENGTH, order=4),
  ),
  "qlstm, as printed": (QLSTM, {"variant": "paper"}, qlstm.qlstm_printed),
  "qlstm_reversed, as printed": (QLSTMReversed, {"variant": "paper"}, qlstm.qlstm_printed),
  "rwkv5, per head": (
    RWKV5,
    HEADS | LAYER | {"decay": "head"},
    functools.partial(rwkv.rwkv5, **HEADS),
  ),
  "rwkv6, narrow keys": (
    RWKV6,
    HEADS | LAYER | {"expand_k": 0.5, "mix_rank": 2, "gate_rank": 2},
    functools.partial(rwkv.rwkv6, **HEADS),
  ),
  "s5, tanh": (
    S5,
    {"state_dim": 8, "gelu": "tanh"},
    functools.partial(state_spaces.s5, gelu=state_spaces.gelu_tanh),
  ),
}


@pytest.mark.parametrize("name", CASES)
def test_option_matches_the_equations(name):
  cls, options, reference = CASES[name]
  mixer, params = disturbed(lambda: cls(DIM, **options, rngs=nnx.Rngs(0)))
  x = inputs(1, 7)
  out, _ = apply(mixer, x)
  assert relative_error(out[0], reference(params, np.float64(x[0]))) < 2e-6


def test_rwkv5_per_head_has_one_decay_and_bonus_per_head():
  mixer = RWKV5(DIM, **HEADS, layer=1, num_layers=2, decay="head", rngs=nnx.Rngs(0))
  np.testing.assert_allclose(mixer.w[...], [-6, -1])
  np.testing.assert_allclose(mixer.u[...], [1, 0])


@pytest.mark.slow
def test_options_on_a_sharded_sequence_equal_one_device():
  errors = result_of("-m", "tests.mixers.options_on_shards", devices=2)
  assert max(errors.values()) < 2e-6, errors
