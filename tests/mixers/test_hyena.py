"""Hyena and BaseConv: the length of their cache, kernels as they start, options, sizes."""

import jax
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import BaseConv, Hyena
from lnssm_jax.models import count_parameters
from tests.mixers import plain_long_convolutions
from tests.mixers.plain_lnssm import apply, float64_params, relative_error, split
from tests.mixers.tiny import DIM, inputs


@pytest.mark.parametrize("mixer", [Hyena, BaseConv])
def test_a_sequence_longer_than_the_cache_is_an_error_where_it_is_known(mixer):
  mixer, x = mixer(DIM, max_length=6, rngs=nnx.Rngs(0)), inputs(1, 7)
  with pytest.raises(ValueError, match=r"x has 7 steps after 0 .* max_length=6"):
    apply(mixer, x)
  full, state = apply(mixer, x[:, :6])
  assert np.isfinite(full).all()
  with pytest.raises(ValueError, match=r"x has 1 steps after 6 .* max_length=6"):
    mixer(x[:, 6:], state)
  late, _ = apply(mixer, x[:, 6:], state)
  assert np.isnan(late).all()


@pytest.mark.parametrize("mixer", [Hyena, BaseConv])
def test_packed_sequences_have_the_length_each(mixer):
  mixer, x = mixer(DIM, max_length=6, rngs=nnx.Rngs(0)), inputs(1, 13)
  out, state = apply(mixer, x, None, np.array([[0] * 5 + [1] * 8]))
  assert np.isfinite(out[:, :11]).all() and np.isnan(out[:, 11:]).all()
  assert state.position == 8


def test_a_short_base_conv():
  mixer, x = BaseConv(DIM, conv_width=4, rngs=nnx.Rngs(0)), inputs(1, 9)
  params = {k: p for k, p in float64_params(mixer).items() if p is not None}
  want = plain_long_convolutions.base_conv(params, np.float64(x[0]))
  out, state = apply(mixer, x)
  assert relative_error(out[0], want) < 2e-6
  parts = [apply(mixer, x[:, :5])]
  parts.append(apply(mixer, x[:, 5:], parts[0][1]))
  np.testing.assert_allclose(np.concatenate([out for out, _ in parts], 1), out, rtol=1e-5)
  np.testing.assert_array_equal(parts[1][1].inputs, state.inputs)
  with pytest.raises(ValueError, match="no long kernel"):
    mixer.taps()


def test_kernels_die_out_at_the_published_rates():
  """To 0.01 within 1.5 lengths in the first channel, within 0.3 in the last."""
  mixer = Hyena(16, max_length=301, rngs=nnx.Rngs(0))
  network = mixer.filter(jax.numpy.zeros((301, 3)), jax.numpy.sin)
  mixer.skip[...] = 0 * mixer.skip[...]
  mixer.filter = lambda features, activation: 1 + 0 * features[:, :1]
  assert network.shape == (301, 16)
  taps = np.asarray(mixer.taps())
  np.testing.assert_allclose(taps[[0, 90, 300], -1], [1, 0.01, 0.01 ** (1 / 0.3)], rtol=1e-4)
  np.testing.assert_allclose(taps[300, 0], 0.01 ** (1 / 1.5), rtol=1e-4)


def test_parameters_are_counted_by_formulas():
  D, R = 12, 8
  size = lambda make: count_parameters(jax.eval_shape(make))
  hyena = size(lambda: Hyena(D, filter_dim=R, rngs=nnx.Rngs(0)))
  network = 4 * R + 2 * (R**2 + R) + R * D
  assert hyena == 4 * D**2 + 4 * 3 * D + network + R + D
  assert size(lambda: BaseConv(D, rngs=nnx.Rngs(0))) == D**2 + D + 4 * D
  long = size(lambda: BaseConv(D, max_length=9, rngs=nnx.Rngs(0)))
  assert long == D**2 + D + 4 * 16 + 17 * D


def test_hyena_starts_as_published():
  params = split(Hyena(256, rngs=nnx.Rngs(0)))[1]
  np.testing.assert_array_equal(params["sine_gain"], np.ones(64))
  np.testing.assert_allclose(np.std(params["skip"]), 1, atol=0.15)
  assert params["filter"]["layer3"].get("bias") is None


@pytest.mark.parametrize(
  "mixer, options, message",
  [
    (Hyena, {"max_length": 0}, "max_length=0 must"),
    (Hyena, {"filter_layers": 0}, "filter_layers=0 must"),
    (Hyena, {"conv_width": 0}, "width=0 must"),
    (BaseConv, {"max_length": 0}, "max_length=0 must"),
    (BaseConv, {"conv_width": -1}, "conv_width=-1 must"),
  ],
)
def test_bad_options_are_named(mixer, options, message):
  with pytest.raises(ValueError, match=message):
    mixer(DIM, **options, rngs=nnx.Rngs(0))
