"""TransNormerLLM's mixer: slopes, decays and positions by layer, constants, size, bad options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import TNL
from lnssm_jax.mixers.tnl import alibi_slopes
from tests.mixers.helpers import apply, float64_params, relative_error, split
from tests.mixers.references import tnl as reference
from tests.mixers.tiny import DIM, inputs


def make(**options):
  return TNL(DIM, num_heads=2, rngs=nnx.Rngs(0), **options)


def test_slopes():
  np.testing.assert_allclose(alibi_slopes(1), [2**-8])
  np.testing.assert_allclose(alibi_slopes(4), [1 / 4, 1 / 16, 1 / 64, 1 / 256])
  np.testing.assert_allclose(alibi_slopes(6)[4:], [2**-1, 2**-3])  # of eight: 1/2, 1/4, 1/8 ...


@pytest.mark.parametrize("layer, height", [(0, 1 + 1e-5), (1, 0.5 + 1e-5), (2, 1e-5)])
def test_decays_are_slower_in_upper_layers(layer, height):
  params = split(make(layer=layer, num_layers=3))[1]
  want = np.array([2**-4, 2**-8]) * height
  np.testing.assert_allclose(np.exp(params["fixed_log_rate"]), want, rtol=1e-5)


@pytest.mark.slow
def test_tnl_positions_are_used_by_the_first_layer_only():
  """So it stays: the gradient of theta is zero elsewhere, and that of the decays everywhere."""
  theta = split(make(layer=0, num_layers=3))[1]["theta"]
  np.testing.assert_allclose(theta, 10000.0 ** -(np.arange(8) / 4), rtol=1e-5)
  mixer = make(layer=1, num_layers=3)
  gradient = jax.jit(jax.grad(lambda mixer: jnp.sum(mixer(inputs(1, 4))[0] ** 2)))(mixer)
  for name in ("theta", "fixed_log_rate"):
    assert not np.any(getattr(gradient, name)[...])
  assert not np.any(mixer.theta[...])
  assert np.any(gradient.q_proj.kernel[...])


def test_without_positions():
  mixer, x = make(positions="none"), inputs(1, 9)
  want = reference.tnl(float64_params(mixer), np.float64(x[0]), num_heads=2)
  assert relative_error(apply(mixer, x)[0][0], want) < 2e-6
  assert mixer.init_state(1).recurrent.kv.shape == (1, 2, 4, 4)


def test_transnormerllm_matches_the_equations():
  mixer, x = make(variant="transnormerllm", norm_eps=1e-8), inputs(1, 9)
  want = reference.tnl(float64_params(mixer), np.float64(x[0]), num_heads=2)
  assert relative_error(apply(mixer, x)[0][0], want) < 2e-6
  assert (make(variant="transnormerllm").norm_eps, make().norm_eps) == (1e-8, 1e-5)
  with pytest.raises(ValueError, match=r"gate_rank=2: the gate .* full rank"):
    make(variant="transnormerllm", gate_rank=2)
