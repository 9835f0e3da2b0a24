"""`task scores` and `task states`, against the functions of `lnssm_jax.analysis` on one array."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import analysis
from tests.train.test_task_lm_eval import make
from train.data import DataError
from train.scoring import memory


@pytest.fixture(scope="module")
def text(tmp_path_factory):
  path = tmp_path_factory.mktemp("text") / "text.jsonl"
  documents = ["some words to read in a row", "short", "other words, as many as there are"]
  path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
  return str(path), [documents[0][:20], documents[2][:20]]


@pytest.fixture(scope="module")
def loaded():
  return make("lnssm")


def tokens_of(documents):
  return np.stack([np.frombuffer(each.encode(), np.uint8).astype(np.int32) for each in documents])


def test_laws_are_those_of_each_head_and_weights_sum_to_one(loaded, text, tmp_path):
  pytest.importorskip("matplotlib")
  path, documents = text
  report = memory.scores(loaded, path, length=20, rows=2)
  found = analysis.scores(loaded.model, jnp.asarray(tokens_of(documents)))
  raw, log = analysis.score_laws(found)
  assert [(row["layer"], row["head"]) for row in report.tables["laws"]] == [(0, 0), (0, 1)]
  for row in report.tables["laws"]:
    assert row["distance"] == pytest.approx(float(raw.distance[row["head"]]), rel=1e-4)
    assert row["log mean"] == pytest.approx(float(log.mean[row["head"]]), rel=1e-4)
  weights = report.details["weights"]
  assert sum(row["share"] for row in weights) == pytest.approx(1)
  visible = np.broadcast_to(np.asarray(found.visible), found.value.shape)
  inside = np.asarray(found.weights())[visible]
  last = ((inside >= weights[-1]["from"]) & (inside <= 1)).mean()
  assert weights[-1]["share"] == pytest.approx(last, abs=1e-6) != 0
  counts, _ = np.histogram(inside, memory.EDGES)  # of all documents and heads
  shares = [row["share"] for row in weights]
  np.testing.assert_allclose(shares, counts / counts.sum(), atol=2.5 / inside.size)
  report.draw(tmp_path / "scores.png")
  assert (tmp_path / "scores.png").stat().st_size > 5000


def test_states_have_their_entropy_rank_and_reach(loaded, text):
  path, documents = text
  report = memory.states(loaded, path, length=20, rows=2)
  (found,) = analysis.document_states(loaded.model, list(tokens_of(documents)))
  (row,) = report.tables["states"]
  S = np.asarray(found["recurrent"], np.float64)
  assert (row["rows"], row["columns"]) == S.shape[2:]
  p = np.linalg.svd(S, compute_uv=False) ** 2
  p /= p.sum(-1, keepdims=True)
  assert row["entropy"] == pytest.approx(-(p * np.log(p)).sum(-1).mean() / np.log(8), rel=1e-3)
  unit = S / np.linalg.norm(S, axis=-1, keepdims=True)
  cosine = np.abs(unit @ unit.swapaxes(-1, -2))[..., *np.triu_indices(8, 1)]
  assert row["cosine"] == pytest.approx(cosine.mean(), rel=1e-4)
  (field,) = analysis.receptive_fields(loaded.model, jnp.asarray(tokens_of(documents)))
  assert report.tables["receptive field"] == [
    {"layer": 0, "median": float(np.median(field)), "largest": int(np.max(field))}
  ]


@pytest.mark.slow
def test_numbers_that_a_mixer_does_not_have_are_missing(text):
  path, _ = text
  negative = memory.scores(make("gla"), path, length=20, rows=2).tables["laws"][0]
  assert negative["log mean"] is None and negative["mean"] is not None
  one_row = memory.states(make("lrn"), path, length=20, rows=1).tables["states"][0]
  assert (one_row["rows"], one_row["cosine"]) == (1, None)
  assert "receptive field" not in memory.states(make("delta_net"), path, length=9, rows=1).tables


@pytest.mark.slow
def test_models_and_texts_without_the_subject_raise(text):
  path, _ = text
  with pytest.raises(DataError, match=r"has 2 documents of at least 20 tokens, less than 3"):
    memory.states(make("lrn"), path, length=20, rows=3)
  with pytest.raises(ValueError, match=r"no layer of m has a recurrent state"):
    memory.states(make("softmax_attention", max_length=64), path, length=20, rows=2)
  with pytest.raises(ValueError, match=r"no layer of m has scores"):
    memory.scores(make("lrn"), path, length=20, rows=2)
