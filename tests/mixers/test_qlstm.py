"""The quasi-LSTM and its modified form: how they start, sizes, the exponent, bad options."""

import jax
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import QLSTMReversed
from lnssm_jax.models import Block, ModelConfig
from tests.mixers.helpers import apply, split
from tests.mixers.tiny import DIM, inputs


@pytest.mark.slow
def test_kernels_start_as_published():
  params = split(QLSTMReversed(64, rngs=nnx.Rngs(0)))[1]
  for name, inputs_ in (("in_proj", 64), ("x_proj", 128), ("o_proj", 128)):
    np.testing.assert_allclose(np.std(params[name]["kernel"]), inputs_**-0.5, rtol=0.05)
  np.testing.assert_array_equal(params["x_proj"]["bias"], np.zeros(384))
  np.testing.assert_array_equal(params["alpha"], [1.0])


@pytest.mark.slow
def test_qlstm_exponents_start_equal_and_softplus_keeps_a_gradient():
  x, alphas = inputs(1, 5), {}
  loss = jax.jit(jax.grad(lambda mixer: (mixer(x)[0] ** 2).sum()))
  outs = []
  for exponent in ("relu", "softplus"):
    mixer = QLSTMReversed(DIM, exponent=exponent, rngs=nnx.Rngs(0))
    outs.append(apply(mixer, x)[0])
    mixer.alpha[...] = mixer.alpha[...] - 2
    alphas[exponent] = loss(mixer).alpha[...]
  np.testing.assert_allclose(outs[0], outs[1], rtol=1e-5, atol=1e-7)
  assert alphas["relu"] == 0 and alphas["softplus"] != 0


def test_output_matrix_starts_as_the_others_in_a_model_that_starts_them():
  """In other mixers it is divided by the root of the number of branches."""
  sizes = {"vocab_size": 3, "dim": 64, "num_heads": 2, "num_layers": 8, "channel_mixer": "none"}
  place = {"mixer_options": {}, "layer": 0, "matrix_std": 0.02}
  make = lambda name: Block(
    ModelConfig(**sizes), mixer=name, **place, rngs=nnx.Rngs(0)
  ).mixer.o_proj.kernel[...]
  for name, std in (("qlstm", 0.02), ("gla", 0.02 / 8**0.5)):
    assert abs(np.std(make(name)) / std - 1) < 0.05
