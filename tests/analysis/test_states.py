"""States by document, along a text and across boundaries against plain calls and NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import analysis
from lnssm_jax.mixers import LRN
from tests.analysis.models import TOKENS, VOCAB, model
from tests.mixers import tiny
from tests.mixers.helpers import drawn

RANDOM = np.random.default_rng(0)
STATES = RANDOM.normal(size=(2, 3, 4, 5)).astype(np.float32)
STATES[0, 0] = 0
STATES[0, 1] = np.outer(np.arange(1, 5), np.arange(5))  # rank 1
STATES[0, 2] = np.eye(4, 5)


run = jax.jit(lambda model, inputs: model(inputs))


def test_entropy_and_rank_are_those_of_singular_values():
  entropy, rank = analysis.singular_value_entropy(STATES), analysis.effective_rank(STATES)
  for place in np.ndindex(2, 3):
    s = np.linalg.svd(STATES[place].astype(np.float64), compute_uv=False)
    p, q = (w / (w.sum() or 1) for w in (s**2, s))
    summed = lambda w: -np.sum(w[w > 1e-12] * np.log(w[w > 1e-12]))
    np.testing.assert_allclose(entropy[place], summed(p) / np.log(4), atol=2e-5)
    np.testing.assert_allclose(rank[place], np.exp(summed(q)), rtol=2e-5)
  np.testing.assert_allclose(entropy[0], [0, 0, 1], atol=1e-5)
  np.testing.assert_allclose(rank[0], [1, 1, 4], rtol=1e-4)


def test_row_cosines_are_those_of_rows():
  got = analysis.row_cosine(STATES)
  S = STATES[1, 2].astype(np.float64)
  want = S @ S.T / np.outer(np.linalg.norm(S, axis=1), np.linalg.norm(S, axis=1))
  np.testing.assert_allclose(got[1, 2], want, atol=1e-6)
  assert np.all(np.asarray(got[0, 0]) == 0)


def test_row_cosines_of_complex_states_are_those_of_their_parts():
  """A complex row is a real one of its real and its imaginary parts."""
  real, imaginary = STATES[1, 2], STATES[0, 2]
  want = analysis.row_cosine(np.concatenate([real, imaginary], axis=1))
  np.testing.assert_allclose(analysis.row_cosine(real + 1j * imaginary), want, atol=1e-6)


def test_states_of_documents_are_those_of_calls():
  lnssm, documents = model(), [TOKENS[0, :5], TOKENS[1], TOKENS[1, 3:4]]
  got = analysis.document_states(lnssm, documents)
  assert [states.keys() for states in got] == [{"recurrent"}] * 3
  for number, document in enumerate(documents):
    _, state = run(lnssm, document[None])
    for layer in range(3):
      want = state.mixer.recurrent.kv[layer, 0]
      np.testing.assert_allclose(got[layer]["recurrent"][number], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  ("name", "shapes"),
  [
    ("sse", {"always": (1, 2, 4, 4), "sparse": (1, 2, 12, 4)}),
    ("gsa", {"keys": (1, 2, 4, 3), "values": (1, 2, 3, 4)}),
    ("mamba", {"recurrent": (1, 1, 16, 3)}),
    ("rwkv4", {"recurrent": (1, 1, 1, 8)}),
    ("hgrn", {"recurrent": (1, 1, 1, 8)}),
    ("gla", {"recurrent": (1, 2, 2, 4)}),
    ("softmax_attention", {}),
  ],
)
def test_matrices_are_named_by_their_fields(name, shapes):
  found = analysis.matrices(tiny.starting(name).init_state(1))
  assert {name: part.shape for name, part in found.items()} == shapes


def test_rows_of_partitions_stand_side_by_side():
  sse = tiny.starting("sse")
  state = sse.init_state(1)
  kv = jnp.asarray(RANDOM.normal(size=state.sparse.kv.shape))
  got = analysis.matrices(state._replace(sparse=state.sparse._replace(kv=kv)))["sparse"]
  for partition in range(3):
    np.testing.assert_array_equal(got[:, :, 4 * partition : 4 * partition + 4], kv[:, partition])


def test_norms_along_a_text_are_those_of_prefixes():
  lnssm = model()
  got = analysis.state_norms(lnssm, TOKENS, every=6)
  for index, length in enumerate((6, 12)):
    kv = run(lnssm, TOKENS[:, :length])[1].mixer.recurrent.kv  # [L, B, H, K, V]
    want = np.sqrt(np.sum(np.float64(kv) ** 2, axis=(-2, -1)))
    for layer in range(3):
      np.testing.assert_allclose(got[layer]["recurrent"][index], want[layer], rtol=1e-4)


def test_reset_at_a_boundary_leaves_no_influence():
  first, second = TOKENS[:, :7], TOKENS[:, 7:]
  influence = analysis.boundary_influence(model(), first, second, reset=True)
  assert influence.output.shape == (3, 2, 5)
  assert np.all(np.asarray(influence.output) == 0)
  assert np.all(np.asarray(influence.state) == 0)


class Crossing(LRN):
  """A mixer with a fault: its state crosses the boundaries of documents."""

  def _mix(self, x, state, segment_ids):
    return super()._mix(x, state, None)


def test_influence_with_reset_shows_what_crosses_a_boundary():
  mixer = drawn(lambda: Crossing(8, rngs=tiny.nnx.Rngs(0)))
  x = tiny.inputs(2, 9)
  got = analysis.boundary_influence(mixer, x[:, :5], x[:, 5:], reset=True)
  other = jnp.concatenate([x[:, 4::-1], x[:, 5:]], axis=1)
  (y, state), (y_other, state_other) = run(mixer, x), run(mixer, other)
  apart = lambda a, b: np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)
  np.testing.assert_allclose(got.output[0], apart(y[:, 5:], y_other[:, 5:]), rtol=1e-4)
  np.testing.assert_allclose(got.state[0], apart(state[0], state_other[0]), rtol=1e-4)
  assert np.all(np.asarray(got.state) > 0)


@pytest.mark.slow
def test_influence_on_a_mixer_is_the_difference_to_the_document_alone():
  """Of a mixer with two recurrent states."""
  mixer, x = tiny.starting("gsa"), tiny.inputs(2, 9)
  got = analysis.boundary_influence(mixer, x[:, :5], x[:, 5:], reset=False)
  (y, state), (alone, state_alone) = run(mixer, x), run(mixer, x[:, 5:])
  apart = lambda a, b: np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)
  flat = lambda state: np.hstack([z.reshape(2, -1) for z in analysis.matrices(state).values()])
  np.testing.assert_allclose(got.output[0], apart(y[:, 5:], alone), rtol=1e-4)
  np.testing.assert_allclose(got.state[0], apart(flat(state), flat(state_alone)), rtol=1e-4)


@pytest.mark.slow
def test_influence_without_reset_is_the_difference_to_the_document_alone():
  first, second = TOKENS[:, :7], TOKENS[:, 7:]
  lnssm = model()
  influence = analysis.boundary_influence(lnssm, first, second, reset=False)
  # Of the first layer: its input is that of the document alone.
  block = lnssm.layer(0)
  x = block.mixer_norm(lnssm.embed(TOKENS))
  (y, state), (alone, state_alone) = run(block.mixer, x), run(block.mixer, x[:, 7:])
  y, alone = np.float64(y[:, 7:]), np.float64(alone)
  want = np.linalg.norm(y - alone, axis=-1) / np.linalg.norm(alone, axis=-1)
  np.testing.assert_allclose(influence.output[0], want, rtol=1e-3)
  kv, kv_alone = (np.float64(s.recurrent.kv).reshape(2, -1) for s in (state, state_alone))
  want = np.linalg.norm(kv - kv_alone, axis=-1) / np.linalg.norm(kv_alone, axis=-1)
  np.testing.assert_allclose(influence.state[0], want, rtol=1e-3)
  assert np.all(np.asarray(influence.output) > 0)


def test_size_of_the_state_counts_recurrent_numbers():
  assert analysis.state_size(model()) == 3 * 2 * 4 * 4
  assert analysis.state_size(tiny.starting("sse")) == 2 * 4 * 4 * 4
  assert analysis.state_size(tiny.starting("hgrn")) == 2 * 8
  assert analysis.state_size(tiny.starting("softmax_attention")) == 0


def test_recall_is_the_share_of_right_labels():
  lnssm = model()
  best = np.argmax(np.asarray(run(lnssm, TOKENS)[0]), axis=-1)
  labels = np.where(np.arange(12) % 3 == 0, best, -100)
  assert analysis.recall(lnssm, TOKENS, labels) == 1
  labels[0] = np.where(labels[0] >= 0, (labels[0] + 1) % VOCAB, -100)
  assert analysis.recall(lnssm, TOKENS.tolist(), labels.tolist()) == 0.5


def test_wrong_texts_raise():
  with pytest.raises(ValueError, match="every=5 does not divide the text's T=12 tokens"):
    analysis.state_norms(model(), TOKENS, every=5)
  with pytest.raises(ValueError, match=r"documents have shapes \[\]; give at least one"):
    analysis.document_states(model(), [])
  with pytest.raises(ValueError, match=r"documents have shapes \[\(0,\)\]"):
    analysis.document_states(model(), [TOKENS[0, :0]])
  with pytest.raises(ValueError, match="second has 1 rows, but first has 2"):
    analysis.boundary_influence(model(), TOKENS, TOKENS[:1], reset=True)
  with pytest.raises(ValueError, match=r"labels has shape \(2, 11\)"):
    analysis.recall(model(), TOKENS, TOKENS[:, 1:])
  with pytest.raises(ValueError, match=r"model is a int; .* `load_model` returns"):
    analysis.recall(3, TOKENS, TOKENS)
  with pytest.raises(ValueError, match=r"a text of 12 tokens is longer than .* max_length=8"):
    analysis.state_norms(short_cache(), tiny.inputs(1, 12), every=4)


def short_cache():
  return tiny.MIXERS["softmax_attention"](8, num_heads=2, max_length=8, rngs=tiny.nnx.Rngs(0))
