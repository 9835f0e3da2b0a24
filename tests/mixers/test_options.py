"""Options of mixers that no case of tests/peers has, against their equations in float64."""

import functools

import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import GLA, QLSTM, RWKV5, Mamba, Mamba2, QLSTMReversed
from tests.devices import result_of
from tests.mixers.helpers import apply, relative_error
from tests.mixers.references import linear_attention, mamba, qlstm
from tests.mixers.tiny import DIM, disturbed, inputs

HEADS = {"num_heads": 2}


def without_convolution(reference, width):
  """The reference with a convolution that returns its input."""
  conv = {"kernel": np.ones((1, width))}
  return lambda params, x: reference(params | {"conv": conv}, x)


# The class, its options, the reference.
CASES = {
  "gla of Longhorn's experiments": (
    GLA,
    HEADS | {"gate_rank": 3, "norm": "layer", "norm_scale": False, "gate_bias": True},
    functools.partial(linear_attention.gla, **HEADS),
  ),
  "mamba, no convolution": (
    Mamba,
    {"state_dim": 3, "conv_size": None},
    without_convolution(mamba.mamba, 2 * DIM),
  ),
  "mamba2, no convolution": (
    Mamba2,
    {"head_dim": 4, "state_dim": 3, "conv_size": None},
    without_convolution(functools.partial(mamba.mamba2, head_dim=4), 2 * DIM + 2 * 3),
  ),
  "qlstm, as printed": (QLSTM, {"variant": "paper"}, qlstm.qlstm_printed),
  "qlstm_reversed, as printed": (QLSTMReversed, {"variant": "paper"}, qlstm.qlstm_printed),
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
