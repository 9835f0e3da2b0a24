"""S4: HiPPO at the start, long sequences, sizes, bad options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import S4
from lnssm_jax.mixers.common.hippo import hippo_normal
from tests.mixers.helpers import apply, float64_params, relative_error, split
from tests.mixers.references.state_spaces import s4
from tests.mixers.tiny import inputs


def test_s4_starts_as_hippo():
  N = 8
  params = float64_params(S4(4, state_dim=N, rngs=nnx.Rngs(0)))
  _, v, p = hippo_normal(N)
  half = v[:, N // 2 :]
  back = lambda name: 2 * (half @ (params[f"{name}_real"] + 1j * params[f"{name}_imag"])).real
  np.testing.assert_allclose(back("p"), p, rtol=1e-5)
  np.testing.assert_allclose(back("b"), np.sqrt(2 * np.arange(N) + 1), rtol=1e-5)
  poles = -np.exp(params["pole_log"]) + 1j * params["pole_imag"]
  a = 2 * (half @ np.diag(poles) @ half.conj().T).real - np.outer(p, p)
  assert np.abs(np.triu(a, 1)).max() < 1e-5
  np.testing.assert_allclose(np.diag(a), -(np.arange(N) + 1), rtol=1e-5)


def test_s4_transition_norm_is_at_most_one():
  mixer = S4(8, state_dim=16, rngs=nnx.Rngs(0))
  norms = np.linalg.norm(jax.jit(lambda mixer: mixer._matrix())(mixer), 2, axis=(1, 2))
  assert norms.max() <= 1 + 1e-5


@pytest.mark.slow
def test_s4_long_sequence_matches_reference():
  mixer, x = S4(8, state_dim=16, rngs=nnx.Rngs(0)), inputs(1, 300)
  want = s4(float64_params(mixer), np.float64(x[0]))
  out, _ = apply(mixer, x)
  assert relative_error(out[0], want) < 1e-5
  first, state = apply(mixer, x[:, :45])
  last, _ = apply(mixer, x[:, 45:], state)
  assert relative_error(jnp.concatenate([first, last], axis=1)[0], want) < 1e-5


def test_s4_step_sizes_are_log_uniform():
  steps = split(S4(512, state_dim=2, rngs=nnx.Rngs(0)))[1]["log_dt"] / np.log(10)
  np.testing.assert_allclose(np.quantile(steps, [0, 0.5, 1]), [-3, -2, -1], atol=0.1)
