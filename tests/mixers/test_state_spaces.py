"""S4D, DSS, S5: the HiPPO matrix, how they start, sizes, bad options."""

import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import DSS, S4D, S5
from lnssm_jax.mixers.common.hippo import hippo_normal, positive_frequencies
from tests.mixers.helpers import apply, float64_params, inputs, relative_error, split
from tests.mixers.references import state_spaces as reference


def test_the_hippo_matrix_is_normal_but_for_rank_one():
  n = np.arange(12)
  root = np.sqrt(2 * n + 1)
  a = -np.tril(np.outer(root, root), -1) - np.diag(n + 1)
  poles, v, p = hippo_normal(12)
  np.testing.assert_allclose(v @ np.diag(poles) @ v.conj().T - np.outer(p, p), a, atol=1e-10)
  np.testing.assert_allclose(v.conj().T @ v, np.eye(12), atol=1e-12)
  np.testing.assert_allclose(np.sort(np.linalg.eigvals(a)), np.sort(-(n + 1.0)), atol=1e-4)


def test_eigenvalues_come_in_pairs():
  poles = hippo_normal(8)[0]
  assert np.all(positive_frequencies(4).imag > 0)
  np.testing.assert_allclose(poles[:4], poles[4:][::-1].conj(), atol=1e-12)


def test_s4d_starts_as_published():
  params = split(S4D(128, state_dim=8, rngs=nnx.Rngs(0)))[1]
  np.testing.assert_allclose(np.exp(params["a_log"]), np.full((128, 4), 0.5), rtol=1e-6)
  np.testing.assert_allclose(params["a_imag"], np.tile(np.pi * np.arange(4), (128, 1)), rtol=1e-6)
  c = params["c_real"] + 1j * params["c_imag"]
  np.testing.assert_allclose(np.mean(np.abs(c) ** 2), 1, atol=0.15)
  quartiles = np.quantile(params["log_dt"], [0.0, 0.5, 1.0]) / np.log(10)
  np.testing.assert_allclose(quartiles, [-3, -2, -1], atol=0.2)


def test_dss_starts_as_published():
  params = split(DSS(64, state_dim=16, rngs=nnx.Rngs(0)))[1]
  np.testing.assert_allclose(np.exp(params["pole_log"]), np.full(16, 0.5), rtol=1e-5)
  np.testing.assert_allclose(params["pole_imag"], positive_frequencies(16).imag, rtol=1e-5)
  np.testing.assert_allclose(np.std(params["c_real"]), 1, atol=0.1)


@pytest.mark.slow
def test_dss_softmax_divides_powers_by_their_sum():
  """Also for sequences longer than the kernel, cut in two, and with poles that hardly decay."""
  length = 9
  graph, params = split(DSS(4, state_dim=3, kernel_length=length, rngs=nnx.Rngs(0)))
  params["pole_log"] = params["pole_log"] + np.float32([-4, 0, 1])
  mixer, x = nnx.merge(graph, params), inputs(1, 21, 4)
  want = reference.dss_softmax(float64_params(mixer), np.float64(x[0]), length=length)
  first, state = apply(mixer, x[:, :13])
  last, _ = apply(mixer, x[:, 13:], state)
  assert relative_error(np.concatenate([first, last], axis=1)[0], want) < 2e-6


@pytest.mark.slow
def test_s5_starts_as_published():
  D, N, blocks = 64, 32, 2
  params = split(S5(D, state_dim=N, num_blocks=blocks, rngs=nnx.Rngs(0)))[1]
  half = positive_frequencies(N // blocks // 2).imag
  np.testing.assert_allclose(params["pole_imag"], np.tile(half, blocks), rtol=1e-5)
  # V^* keeps lengths: both of a pair hold half of a real vector's.
  for name, variance in (("b_proj", 0.5 / N), ("c_proj", 0.5 * 2 / N)):
    np.testing.assert_allclose(np.var(params[name]["kernel"]), variance, rtol=0.1)
