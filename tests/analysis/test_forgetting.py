"""Half-lives and receptive fields against products of decays, one token at a time."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import analysis, ops
from tests.analysis.models import TOKENS, model
from tests.mixers import tiny

PATTERN = ("gla", "softmax_attention")


def test_half_lives_of_constant_decays_need_no_text():
  lives = analysis.half_lives(model())
  for layer in range(3):
    w = np.asarray(model().blocks.mixer.w[layer], np.float64).reshape(2, 4)
    np.testing.assert_allclose(lives[layer], math.log(2) / np.exp(w), rtol=1e-5)
  slowest = analysis.slowest_head(lives)
  assert slowest.half_life == max(np.median(head) for life in lives for head in life)
  assert slowest.half_life == np.median(lives[slowest.layer][slowest.head])


def test_half_lives_of_a_text_are_those_of_its_mean_decay():
  hybrid = model(PATTERN)
  got = analysis.half_lives(hybrid, TOKENS)
  assert got[1] is None
  run = jax.jit(lambda block, x: (block(x)[0], block.mixer_norm(x)))
  decays = jax.jit(lambda mixer, x: mixer.decay(x))
  x = hybrid.embed(TOKENS)
  for layer in range(3):
    block = hybrid.layer(layer)
    x, normed = run(block, x)
    if layer != 1:
      decay = decays(block.mixer, normed)
      # After that many tokens of the mean decay, one half is left.
      kept = np.exp(np.float64(decay).mean((0, 1)) * np.float64(got[layer]))
      np.testing.assert_allclose(kept, 0.5, rtol=1e-4)


def test_layers_that_share_a_table_have_their_rows_of_it():
  hgrn = model("hgrn", mixer_options=_Options(lower_bound="shared"))
  x = hgrn.embed(TOKENS)
  want = hgrn.layer(0).mixer.decay(hgrn.layer(0).mixer_norm(x))
  np.testing.assert_allclose(analysis.decays(hgrn, TOKENS)[0], want, rtol=1e-4)


def test_half_lives_have_their_limits():
  class Ends(type(tiny.starting("lnssm"))):
    def decay(self, x=None, state=None, segment_ids=None):
      return jnp.asarray([[0.0, -0.0, -jnp.inf, math.log(0.5)]])

  mixer = Ends(8, num_heads=2, rngs=tiny.nnx.Rngs(0))
  np.testing.assert_allclose(analysis.half_lives(mixer)[0], [[np.inf, np.inf, 0, 1]], rtol=1e-6)


def test_decays_without_text_raise_where_they_need_it():
  with pytest.raises(ValueError, match=r"inputs=None, but decays of .*GLA.* give tokens \[B, T\]"):
    analysis.decays(model(PATTERN))
  with pytest.raises(ValueError, match=r"inputs='some text' is text; give tokens"):
    analysis.half_lives(model(PATTERN), "some text")
  with pytest.raises(NotImplementedError, match="no layer has a decay; the mixers are DeltaNet"):
    analysis.half_lives(tiny.starting("delta_net"), tiny.inputs(1, 2))
  with pytest.raises(ValueError, match="lives holds no half-life"):
    analysis.slowest_head([None])


def field_by_products(decay, first, t, threshold):
  """max {t - s}: float64 [H, K], of decays [T, H, K] and of which tokens are first [T]."""
  field = np.zeros(decay.shape[1:], int)
  for distance in range(1, t + 1):
    s = t - distance
    product = np.prod(decay[s + 1 : t + 1], axis=0) * (not first[s + 1 : t + 1].any())
    field = np.where(product >= threshold, distance, field)
  return field


@pytest.mark.parametrize("segments", [False, True])
def test_receptive_field_is_the_longest_product_above_the_threshold(segments):
  random = np.random.default_rng(0)
  decay = random.uniform(0.3, 1, (2, 9, 2, 3))
  decay[0, 4, 0, 1] = 0
  decay[1, :, 1, 2] = 1
  ids = np.asarray([[0, 0, 0, 1, 1, 1, 1, 1, 0], [5] * 9]) if segments else None
  with np.errstate(divide="ignore"):
    log = jnp.asarray(np.log(decay))
  got = analysis.receptive_field(log, ids, window=5, threshold=0.05)
  assert got.shape == (2, 5, 2, 3)
  assert got.dtype == jnp.int32
  for row in range(2):
    first = np.zeros(9, bool) if ids is None else np.diff(ids[row], prepend=ids[row][:1]) != 0
    for w, t in enumerate(range(4, 9)):
      np.testing.assert_array_equal(got[row, w], field_by_products(decay[row], first, t, 0.05))


@pytest.mark.slow
def test_receptive_fields_of_a_mixer_are_those_of_its_decays():
  lnssm, x = tiny.starting("lnssm"), tiny.inputs(1, 6)
  (got,) = analysis.receptive_fields(lnssm, x, window=2, threshold=0.5)
  decay = np.broadcast_to(np.exp(np.float64(lnssm.decay())), (6, 2, 4))
  want = [field_by_products(decay, np.zeros(6, bool), t, 0.5) for t in (4, 5)]
  np.testing.assert_array_equal(got[0], want)


@pytest.mark.slow
def test_receptive_field_of_a_partition_counts_the_steps_that_select_it():
  sse, x = tiny.randomized("sse"), tiny.inputs(1, 8)

  @jax.jit
  def given(mixer):
    with ops.recording() as calls:
      mixer(x)
    arguments = calls[-1].arguments
    return arguments["log_decay"][0], arguments["indices"][0]

  log_decay, indices = map(np.asarray, given(sse))  # [T, H, K], [T, 1]
  (got,) = analysis.receptive_fields(sse, x, window=1, threshold=0.8)
  for partition in range(3):
    decay = np.where((indices == partition)[..., None], np.exp(np.float64(log_decay)), 1)
    want = field_by_products(decay, np.zeros(8, bool), 7, 0.8)
    rows = slice(4 * (partition + 1), 4 * (partition + 2))  # after the state that all use
    np.testing.assert_array_equal(got[0, 0, :, rows], want)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"log_decay": jnp.zeros((2, 3))}, r"log_decay has shape \(2, 3\)"),
    ({"threshold": 0.0}, "threshold=0.0 must be above 0"),
    ({"window": 0}, "window=0"),
  ],
)
def test_receptive_field_of_wrong_arguments_raises(arguments, message):
  with pytest.raises(ValueError, match=message):
    analysis.receptive_field(**{"log_decay": jnp.zeros((1, 2, 1, 1))} | arguments)


def test_text_that_does_not_fit_raises():
  with pytest.raises(ValueError, match="model is a int; give a LanguageModel"):
    analysis.decays(3, TOKENS)
  with pytest.raises(ValueError, match=r"inputs has shape \(12,\)"):
    analysis.decays(model(PATTERN), TOKENS[0])
  with pytest.raises(ValueError, match="the id 99, but the vocabulary is 0 to 16"):
    analysis.decays(model(PATTERN), [[1, 99]])  # a list, also where a program is compiled
  with pytest.raises(ValueError, match="tokens has dtype float32; it must be integer"):
    analysis.decays(model(PATTERN), [[0.5]])
  with pytest.raises(ValueError, match="inputs=None, but a receptive field"):
    analysis.receptive_fields(model(), None)
  short = model(PATTERN, mixer_options=_Options(softmax_attention={"max_length": 8}))
  with pytest.raises(ValueError, match=r"a text of 12 tokens is longer than .* max_length=8"):
    analysis.decays(short, TOKENS)
  analysis.decays(short, TOKENS, np.repeat([[0, 1]], 6, axis=1).repeat(2, axis=0))


class _Options(dict):
  __hash__ = object.__hash__
