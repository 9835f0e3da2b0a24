"""Scores, their laws and histograms against float64 computations on the parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from lnssm_jax import analysis, ops
from tests.analysis.models import TOKENS, model
from tests.mixers import tiny
from tests.mixers.helpers import float64_params

B, T, H, K = 2, 6, 2, 4
X = tiny.inputs(B, T)
run_block = jax.jit(lambda block, x: block(x)[0])
IDS = np.asarray([[0, 0, 1, 1, 1, 1], [3] * 6])


def lnssm_scores(p, x):
  """exp(q_t) . exp(k_s) per head of the stream x [T, D], [H, T, T]; from the paper's equations."""
  previous = np.concatenate([np.zeros((1, 8)), x[:-1]])
  mixed = lambda mu: p[mu] * x + (1 - p[mu]) * previous
  norm = lambda z: p["gamma"] * z / (np.sqrt(np.mean(z**2, axis=-1, keepdims=True)) + 1e-8)
  heads = lambda z: np.moveaxis(np.exp(norm(z)).reshape(-1, H, K), 1, 0)
  q = heads(mixed("mu_q") @ p["q_proj"]["kernel"])
  k = heads(mixed("mu_k") @ p["k_proj"]["kernel"])
  return q @ np.swapaxes(k, 1, 2)


def test_scores_of_lnssm_are_products_of_exponentials():
  mixer = tiny.randomized("lnssm")
  got = analysis.scores(mixer, X)
  p = float64_params(mixer)
  want = np.stack([lnssm_scores(p, np.float64(row)) for row in X])
  lower = np.tril(np.ones((T, T), bool))
  np.testing.assert_allclose(got.value, np.where(lower, want, 0), rtol=2e-4)
  np.testing.assert_allclose(np.exp(got.log), got.value, rtol=1e-4)
  weights = np.where(lower, want, 0) / (np.where(lower, want, 0).sum(-1, keepdims=True) + 1e-8)
  np.testing.assert_allclose(got.weights(), weights, rtol=2e-4)


def test_scores_do_not_cross_documents():
  got = analysis.scores(tiny.randomized("lnssm"), X, IDS)
  same = IDS[:, :, None] == IDS[:, None]
  want = np.tril(same)[:, None]
  np.testing.assert_array_equal(got.visible, want)
  np.testing.assert_array_equal(np.asarray(got.value) > 0, np.broadcast_to(want, got.value.shape))


@pytest.mark.parametrize("name", ["softmax_attention", "sliding_window_attention"])
def test_scores_of_softmax_attention_are_exponentials(name):
  full = name == "softmax_attention"
  mixer = tiny.randomized(name, **({"scale": 0.3, "soft_cap": 0.2} if full else {}))

  @jax.jit
  def queries_and_keys(mixer):
    with ops.recording() as calls:
      mixer(X)
    return calls[0].arguments["q"], calls[0].arguments["k"]

  q, k = map(np.float64, queries_and_keys(mixer))
  log = np.einsum("bthk,bshk->bhts", q, k)
  log = 0.2 * np.tanh(0.3 * log / 0.2) if full else log / np.sqrt(K)
  got = analysis.scores(mixer, X)
  distance = np.arange(T)[:, None] - np.arange(T)
  visible = (distance >= 0) & (full | (distance < 5))  # the window of the tiny mixer
  np.testing.assert_array_equal(got.visible[0, 0], visible)
  np.testing.assert_allclose(
    np.asarray(got.log)[..., visible], log[..., visible], rtol=1e-4, atol=1e-5
  )
  weights = np.where(visible, np.exp(log), 0)
  weights /= weights.sum(-1, keepdims=True)
  np.testing.assert_allclose(got.weights(), weights, rtol=1e-4, atol=1e-6)


def test_scores_of_linear_attention_may_be_negative():
  got = analysis.scores(tiny.randomized("rwkv5"), X)
  negative = np.asarray(got.value) < 0
  assert negative.any()
  np.testing.assert_array_equal(np.isnan(got.log), negative)
  of_values, of_logarithms = analysis.score_laws(got)
  assert np.isfinite(of_values.distance).all()
  assert np.isnan(of_logarithms.distance).all()


def test_scores_of_a_layer_of_a_model_are_those_of_its_input():
  lnssm = model()
  x = run_block(lnssm.layer(0), lnssm.embed(TOKENS))
  block = lnssm.layer(1)
  want = analysis.scores(block.mixer, block.mixer_norm(x))
  got = analysis.scores(lnssm, TOKENS, layer=1)
  np.testing.assert_allclose(got.value, want.value, rtol=1e-4)


def test_law_has_the_moments_and_the_distance_of_a_sample():
  """The largest gap is at an upper step of the sample's distribution, or at a lower one."""
  sample = np.random.default_rng(0).gamma(2.0, size=(3, 400))
  sample = np.concatenate([sample, -sample])
  where = np.arange(400) < np.asarray([[400], [100], [37]] * 2)
  got = analysis.law(jnp.asarray(sample, jnp.float32), where)
  for row, values in enumerate(sample):
    seen = values[where[row]]
    want = (seen.mean(), seen.std(), stats.skew(seen), stats.kurtosis(seen))
    np.testing.assert_allclose([field[row] for field in got[:4]], want, rtol=1e-3)
    z = (seen - seen.mean()) / seen.std()
    np.testing.assert_allclose(got.distance[row], stats.kstest(z, "norm").statistic, rtol=1e-4)


def test_law_of_log_normal_scores_is_near_in_logarithms_only():
  log = np.random.default_rng(0).normal(size=(2, 2, 64, 64))
  log[:, 1] = 3 * log[:, 1] ** 2  # only the first head has such scores
  visible = np.broadcast_to(np.tril(np.ones((64, 64), bool)), (2, 1, 64, 64))
  as_floats = lambda x: jnp.asarray(x, jnp.float32)
  scores = analysis.Scores(as_floats(np.exp(log)), as_floats(log), jnp.asarray(visible))
  of_values, of_logarithms = analysis.score_laws(scores)
  assert of_logarithms.distance[0] < 0.02 < 0.1 < of_values.distance[0]
  assert of_logarithms.distance[1] > 0.1
  np.testing.assert_allclose(
    of_logarithms.mean[1], log[:, 1, *np.tril_indices(64)].mean(), rtol=1e-4
  )


def test_histogram_counts_as_numpy():
  values = np.random.default_rng(0).normal(size=(2, 3, 50)).astype(np.float32)
  values[0, 0, :4] = [-1, 2, np.nan, np.inf]
  edges = np.linspace(-1, 2, 7, dtype=np.float32)
  where = np.arange(50) < 40
  got = analysis.histogram(values, edges, where)
  for place in np.ndindex(2, 3):
    seen = values[place][where]
    want, _ = np.histogram(seen[~np.isnan(seen)], edges)
    np.testing.assert_array_equal(got[place], want)


def test_scores_that_do_not_exist_raise():
  with pytest.raises(ValueError, match="layer=3 does not exist; there are 3"):
    analysis.scores(model(), TOKENS, layer=3)
  with pytest.raises(ValueError, match="layer=1 does not exist; a mixer is one layer"):
    analysis.scores(tiny.starting("lnssm"), X, layer=1)
  with pytest.raises(NotImplementedError, match="LRN has no scores"):
    analysis.scores(tiny.starting("lrn"), X)
  with pytest.raises(NotImplementedError, match="LLN has no scores"):
    analysis.scores(tiny.starting("lln"), X)
