"""Generation of rows that end, that continue longer than one call, or whose logits are NaN."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax import generate as generation
from lnssm_jax import sampling
from lnssm_jax.generate import SamplingOptions, generate, generate_scored, stream
from tests.models.test_generate import PROMPTS, as_lists, greedy, model

__all__ = ["greedy", "model"]  # fixtures
logits_of = jax.jit(lambda model, ids: model(ids)[0])


def test_row_that_has_ended_repeats_its_stop_token_while_others_continue(model, greedy):
  """Also after the device has been called again, and with log-probabilities."""
  options = SamplingOptions(max_tokens=70, temperature=0)
  plain = as_lists(generate(model, PROMPTS, options))
  assert [row[:12] for row in plain] == greedy
  stop = next(token for token in greedy[0] if any(token not in row for row in plain))
  absent = min({*range(37)}.difference(*plain))
  options = dataclasses.replace(options, stop_token=(absent, stop))
  ends = [row.index(stop) if stop in row else 70 for row in plain]
  steps = np.stack(list(stream(model, PROMPTS, options)), axis=1)
  assert steps.shape[1] == min(70, 1 + max(ends))
  for row, text, end in zip(steps.tolist(), plain, ends, strict=True):
    assert row == [text[n] if n <= end else stop for n in range(len(row))]


def test_token_is_drawn_with_the_key_of_its_number(model):
  """Of the text, not of a call of the device."""
  rows = as_lists(generate(model, PROMPTS, SamplingOptions(max_tokens=70, seed=5)))
  for row, prompt, key in zip(rows, PROMPTS, sampling.row_keys(5, 4), strict=True):
    text = [*prompt, *row]
    logits = logits_of(model, np.array([text + [0] * (80 - len(text))]))[0]
    for number in (0, 31, 32, 33, 64, 69):
      last = logits[len(prompt) + number - 1]
      drawn = jax.random.categorical(jax.random.fold_in(key, number), last - last.max())
      assert row[number] == drawn


def test_log_probs_are_those_of_the_model_without_the_penalty(model):
  """Also after the device has been called again, and of a row that ends before others."""
  options = SamplingOptions(max_tokens=40, seed=5, repetition_penalty=1.3)
  whole = generate_scored(model, PROMPTS, options)
  stop = next(t for t in whole[0].tokens.tolist() if t not in whole[1].tokens.tolist())
  ends = [[*row.tokens.tolist(), stop].index(stop) for row in whole]
  found = generate_scored(model, PROMPTS, dataclasses.replace(options, stop_token=stop))
  assert min(ends) < 40 and [len(row.tokens) for row in found] == ends
  for prompt, row, end in zip(PROMPTS, found, ends, strict=True):
    text = [*prompt, *row.tokens.tolist()]
    logits = logits_of(model, np.array([text + [0] * (80 - len(text))]))[0]
    places = np.arange(len(prompt) - 1, len(text) - 1)
    want = np.asarray(jax.nn.log_softmax(logits, axis=-1))[places, row.tokens]
    np.testing.assert_allclose(row.log_probs, want, rtol=1e-4, atol=1e-5)
    assert len(row.log_probs) == end


def test_cache_has_to_hold_each_row_and_not_the_longest_of_all():
  """The last token is not read: of 4 new ones after 29 tokens all fit into 32."""
  model = types.SimpleNamespace(max_length=32)
  rows = lambda *lengths: [np.zeros(length, np.int32) for length in lengths]
  start = lambda *lengths: generation.Prefix(None, None, None, jnp.array(lengths))
  check = generation._check_length
  check(model, rows(5, 25), 4, start(24, 4))
  check(model, rows(29, 2), 4, None)
  check(model, rows(0, 5), 4, start(24))
  for parts, before, prompt in [
    ((6, 0), (24, 4), 30),
    ((1, 10), (24,), 34),
    ((0, 27), (24, 4), 31),
  ]:
    with pytest.raises(ValueError, match=rf"a prompt of {prompt} tokens is more than .*length=32"):
      check(model, rows(*parts), 4, start(*before))


def test_logits_that_are_nan_are_named(model):
  """Where a row that has not ended would be continued by them."""
  broken, table = nnx.clone(model), model.embedding
  first = generate(model, [[1, 2, 3]] * 4, SamplingOptions(max_tokens=3, temperature=0))[0]
  broken.embedding[...] = table[...].at[int(first[1])].set(jnp.nan)
  rows, others = [[1, 2, 3]] * 3, [[int(first[1])]]
  for how in ({"temperature": 0}, {}):
    with pytest.raises(ValueError, match=r"^the logits of prompt 3, new token 0, are NaN: param"):
      generate(broken, rows + others, SamplingOptions(max_tokens=3, **how))
  greedy = SamplingOptions(max_tokens=3, temperature=0)
  with pytest.raises(ValueError, match=r"prompt 0, new token 2, are NaN.*lnssm-train inspect"):
    generate(broken, [*rows, rows[0]], greedy)
  ended = dataclasses.replace(greedy, stop_token=int(first[1]))
  assert as_lists(generate(broken, [*rows, rows[0]], ended)) == [first[:1].tolist()] * 4
  rows += [row for row in ([4, 5, 6], [7, 8, 9]) if first[1] not in row][:1]
  want = as_lists(generate(model, rows, ended))
  assert [len(text) for text in want] == [1, 1, 1, 3]  # one continues when the others have ended
  assert as_lists(generate(broken, rows, ended)) == want
