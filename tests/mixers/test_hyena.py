"""Hyena and BaseConv: the length of their cache, kernels as they start, options, sizes."""

import jax
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import BaseConv, Hyena
from tests.mixers.helpers import apply, float64_params, relative_error, split
from tests.mixers.references import long_convolutions as reference
from tests.mixers.tiny import DIM, inputs


@pytest.mark.parametrize("mixer", [Hyena, BaseConv])
def test_sequence_longer_than_max_length_raises_where_known(mixer):
  mixer, x = mixer(DIM, max_length=6, rngs=nnx.Rngs(0)), inputs(1, 7)
  with pytest.raises(ValueError, match=r"x has 7 tokens after 0 .* max_length=6"):
    apply(mixer, x)
  full, state = apply(mixer, x[:, :6])
  assert np.isfinite(full).all()
  with pytest.raises(ValueError, match=r"x has 1 tokens after 6 .* max_length=6"):
    mixer(x[:, 6:], state)
  late, _ = apply(mixer, x[:, 6:], state)
  assert np.isnan(late).all()


@pytest.mark.parametrize("mixer", [Hyena, BaseConv])
def test_packed_sequences_have_max_length_each(mixer):
  mixer, x = mixer(DIM, max_length=6, rngs=nnx.Rngs(0)), inputs(1, 13)
  out, state = apply(mixer, x, None, np.array([[0] * 5 + [1] * 8]))
  assert np.isfinite(out[:, :11]).all() and np.isnan(out[:, 11:]).all()
  assert state.position == 8


def test_base_conv_short_kernel_matches_reference():
  mixer, x = BaseConv(DIM, conv_size=4, rngs=nnx.Rngs(0)), inputs(1, 9)
  params = {k: p for k, p in float64_params(mixer).items() if p is not None}
  want = reference.base_conv(params, np.float64(x[0]))
  out, state = apply(mixer, x)
  assert relative_error(out[0], want) < 2e-6
  parts = [apply(mixer, x[:, :5])]
  parts.append(apply(mixer, x[:, 5:], parts[0][1]))
  np.testing.assert_allclose(np.concatenate([out for out, _ in parts], 1), out, rtol=1e-5)
  np.testing.assert_array_equal(parts[1][1].conv.inputs, state.conv.inputs)
  with pytest.raises(ValueError, match="no long kernel"):
    mixer.taps()


@pytest.mark.slow
def test_hyena_kernels_decay_at_the_published_rates():
  """To 0.01 within 1.5 lengths in the first channel, within 0.3 in the last."""
  mixer = Hyena(16, max_length=301, rngs=nnx.Rngs(0))
  network = mixer.filter(jax.numpy.zeros((301, 3)), jax.numpy.sin)
  mixer.skip[...] = 0 * mixer.skip[...]
  mixer.filter = lambda features, activation: 1 + 0 * features[:, :1]
  assert network.shape == (301, 16)
  taps = np.asarray(mixer.taps())
  np.testing.assert_allclose(taps[[0, 90, 300], -1], [1, 0.01, 0.01 ** (1 / 0.3)], rtol=1e-4)
  np.testing.assert_allclose(taps[300, 0], 0.01 ** (1 / 1.5), rtol=1e-4)


def test_hyena_of_a_higher_order_carries_each_convolution():
  mixer, x = Hyena(DIM, max_length=9, order=3, filter_dim=4, rngs=nnx.Rngs(0)), inputs(1, 9)
  whole, last = apply(mixer, x)
  first, state = apply(mixer, x[:, :5])
  second, state = apply(mixer, x[:, 5:], state)
  np.testing.assert_allclose(np.concatenate([first, second], 1), whole, rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(state.recurrent.inputs, last.recurrent.inputs, rtol=1e-4, atol=1e-6)
  with pytest.raises(ValueError, match="order=1 must be at least 2"):
    Hyena(4, order=1, rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_hyena_starts_as_published():
  params = split(Hyena(256, rngs=nnx.Rngs(0)))[1]
  np.testing.assert_array_equal(params["sine_gain"], np.ones(64))
  np.testing.assert_allclose(np.std(params["skip"]), 1, atol=0.15)
  assert params["filter"]["layer3"].get("bias") is None
