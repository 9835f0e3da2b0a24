"""TNN: its kernel as a recurrence, beyond its longest lag too; sizes, bad options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import TNN
from tests.mixers.helpers import apply, float64_params, relative_error, split
from tests.mixers.references import long_convolutions as reference
from tests.mixers.tiny import DIM, inputs


def make(**options):
  return TNN(DIM, rngs=nnx.Rngs(0), **{"max_length": 6, "filter_dim": 4} | options)


def test_tnn_recurrence_equals_the_kernel():
  r = np.random.default_rng(0).normal(size=(512, 3))
  r = np.concatenate([r, -r.sum(0, keepdims=True)])
  mixer = make(max_length=512)
  w = np.complex128(jax.jit(mixer._weights)(np.float32(r)))
  pole = np.exp(2j * np.pi * np.arange(1, 257) / 513)
  taps = np.stack([(w * pole**lag).sum(1).real for lag in range(513)])
  assert relative_error(taps, r) < 1e-6


@pytest.mark.slow
def test_tnn_long_sequence_token_by_token_equals_one_call():
  """The roundings of angles do not add up: they would, to 1e-5 and more."""
  mixer, x = make(max_length=256, decay=0.999), inputs(1, 256)
  step = jax.jit(lambda state, x: mixer(x[:, None], state)[::-1])
  _, out = jax.lax.scan(step, mixer.init_state(1), jnp.moveaxis(x, 1, 0))
  assert relative_error(out[:, 0, 0], apply(mixer, x)[0][0]) < 3e-6


@pytest.mark.slow
def test_tnn_sequence_beyond_the_kernel_continues_periodically():
  mixer, x = make(decay=0.9), inputs(1, 15)
  params = float64_params(mixer)

  def network(layers, lag, act):
    r = network_of_first_lags(layers, lag[:6], act)
    wave = np.concatenate([r, -r.sum(0, keepdims=True)])
    return wave[np.arange(15) % 7]

  network_of_first_lags = reference.network
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(reference, "network", network)
    want = reference.tnn(params, np.float64(x[0]), max_length=15, decay=0.9)
  assert relative_error(apply(mixer, x)[0][0], want) < 2e-6
  first, state = apply(mixer, x[:, :6])
  last, _ = apply(mixer, x[:, 6:], state)
  assert relative_error(jnp.concatenate([first, last], 1)[0], want) < 2e-6


def test_initial_matrices():
  params = split(TNN(64, rngs=nnx.Rngs(0)))[1]
  for value in (params["u_proj"]["kernel"], params["v_proj"]["bias"]):
    assert 0.85 / 8 < np.abs(value).max() <= 1 / 8
  assert 0.85 < np.abs(params["filter"]["layer0"]["kernel"]).max() <= 1
