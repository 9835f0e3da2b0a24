"""Scores of texts near the end of a cache: padding beyond it must not reach what is scored."""

import jax
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.generate import SamplingOptions
from lnssm_jax.models import LanguageModel
from lnssm_jax.pretrained import texts

LIMIT, VOCAB = 40, 13


@pytest.fixture(scope="module")
def model():
  """Two layers: what is NaN beyond the cache of the first would be read by the second."""
  return LanguageModel(
    vocab_size=VOCAB,
    dim=16,
    num_layers=2,
    num_heads=2,
    mixer="softmax_attention",
    mixer_options={"max_length": LIMIT},
    rngs=nnx.Rngs(0),
  )


@pytest.fixture(scope="module")
def log_probs(model):
  """Of all tokens of a row of `LIMIT`."""
  return jax.jit(lambda tokens: jax.nn.log_softmax(model(tokens)[0][0]))


def rows_of(*shapes):
  """Rows of `common` tokens that two share, and others; each scored from the common ones on."""
  rng, rows, starts = np.random.default_rng(0), [], []
  for common, *rest in shapes:
    before = rng.integers(VOCAB, size=common)
    rows += [np.concatenate([before, rng.integers(VOCAB, size=n)]) for n in rest]
    starts += [max(1, common)] * len(rest)
  return rows, starts


@pytest.mark.parametrize(
  "shapes",
  [[(0, LIMIT + 1), (0, 33)], [(36, 4, 5)], [(31, 9, 5), (9, 30, 32)]],
  ids=["alone", "a shared beginning", "two of different lengths"],
)
def test_scores_near_the_end_of_a_cache_are_those_of_each_row_alone(
  model, log_probs, monkeypatch, shapes
):
  monkeypatch.setattr(texts, "_CHUNK", 16)
  rows, starts = rows_of(*shapes)
  found = texts.score_tokens(model, rows, starts, batch=4)
  for row, start, score in zip(rows, starts, found, strict=True):
    padded = np.zeros((1, LIMIT), np.int32)
    padded[0, : len(row) - 1] = row[:-1]
    wanted = np.asarray(log_probs(padded))[: len(row) - 1]
    wanted = np.take_along_axis(wanted, row[1:, None], axis=1)[start - 1 :, 0]
    np.testing.assert_allclose(score.log_probs, wanted, atol=2e-5)


def test_each_of_many_prompts_has_its_own_seed_in_batches_by_length(monkeypatch):
  """And its own number, for keys of one seed."""
  shown = lambda model, tokenizer, rows, options, *, until, numbers: [
    (row, seed, number) for row, seed, number in zip(rows, options.seed, numbers, strict=True)
  ]
  monkeypatch.setattr(texts, "complete_tokens", shown)
  monkeypatch.setattr(texts, "encode_prompt", lambda tokenizer, prompt, how: np.arange(len(prompt)))
  prompts = ["abc", "a", "abcd", "ab", ""]
  options = SamplingOptions(max_tokens=1, seed=(7, 8, 9, 5, 6))
  rows = zip(prompts, options.seed, range(5), strict=True)
  wanted = [(list(range(len(prompt))), seed, number) for prompt, seed, number in rows]
  assert list(texts.complete_each(None, None, prompts, options, batch=2)) == wanted
  monkeypatch.setattr(texts, "_SORTED", 1)  # two are sorted together, then two others
  for first in (0, 1, 4):
    found = list(texts.complete_each(None, None, prompts, options, batch=2, first=first))
    assert found == wanted[first:]
