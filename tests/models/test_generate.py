"""Generation: exact with respect to batching, chunks and options; constant memory and programs."""

import dataclasses
import gc
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax import generate as generation
from lnssm_jax import prefill, sampling
from lnssm_jax.generate import SamplingOptions, generate, generate_scored, read, stream
from lnssm_jax.models import LanguageModel, layers

PROMPTS = [[1, 2, 3], [4], [5, 9, 11, 0, 7, 30, 2], [8, 8, 8, 8]]


@pytest.fixture(scope="module")
def model():
  """A model whose greedy continuations are not constant."""
  build = lambda: LanguageModel(vocab_size=37, dim=8, num_layers=2, mixer="lrn", rngs=nnx.Rngs(0))
  model = jax.jit(build)()
  leaves, structure = jax.tree.flatten(model)
  keys = jax.random.split(jax.random.key(33), len(leaves))
  is_matrix = lambda leaf: leaf.ndim >= 2 and min(leaf.shape[-2:]) >= 8
  draw = lambda leaf, key: jax.random.normal(key, leaf.shape) if is_matrix(leaf) else leaf
  return jax.tree.unflatten(structure, map(draw, leaves, keys))


@pytest.fixture(scope="module")
def greedy(model):
  """The greedy continuations by the parallel form alone: the whole text is read again each time."""
  width = 24
  logits = jax.jit(lambda ids: model(ids)[0])
  texts = [list(prompt) for prompt in PROMPTS]
  for _ in range(12):
    padded = np.array([text + [0] * (width - len(text)) for text in texts])
    out = np.asarray(logits(padded))
    for row, text in enumerate(texts):
      text.append(int(out[row, len(text) - 1].argmax()))
  return [text[len(prompt) :] for text, prompt in zip(texts, PROMPTS, strict=True)]


def as_lists(rows):
  return [row.tolist() for row in rows]


def test_greedy_texts_of_the_fixture_differ_and_vary(greedy):
  assert len(set(map(tuple, greedy))) == len(PROMPTS)
  assert all(len(set(text)) > 2 for text in greedy)


@pytest.mark.parametrize("prefill_chunk", [1, 3, 256])
def test_batch_with_any_prefill_chunk_equals_the_parallel_form(model, greedy, prefill_chunk):
  rows = generate(
    model, PROMPTS, SamplingOptions(max_tokens=12, temperature=0, prefill_chunk=prefill_chunk)
  )
  assert as_lists(rows) == greedy
  assert {row.dtype for row in rows} == {np.dtype(np.int32)}


@pytest.mark.parametrize(
  ("rows", "chunk"),
  [(1, 2048), (32, 2048), (33, 1024), (64, 1024), (65, 512), (4096, 16), (10**6, 16)],
)
def test_default_prefill_chunk_bounds_the_tokens_of_all_rows(rows, chunk):
  assert prefill.default_prefill_chunk(rows) == chunk


def test_default_prefill_chunk_is_that_of_the_rows_that_are_read(model, monkeypatch):
  pieces, first, extend = [], prefill._prefill, prefill.extend
  noted = lambda read: lambda *args: (pieces.append(args[2].shape), read(*args))[1]
  monkeypatch.setattr(prefill, "_prefill", noted(first))
  monkeypatch.setattr(generation, "extend", noted(extend))
  monkeypatch.setattr(prefill, "_PREFILL_TOKENS", 64)
  prompts = [[3, 1, 4, 1, 5] * 8, [9] * 33, [2] * 33]
  want = read(model, prompts, prefill_chunk=64).logits
  for get in (
    lambda: read(model, prompts),
    lambda: read(model, [prompt[1:] for prompt in prompts], start=read(model, [[3], [9], [2]])),
  ):
    pieces.clear()
    np.testing.assert_allclose(get().logits, want, rtol=1e-4, atol=1e-5)
    # 16 of each of three rows; two rows with a start, of equal length, have 32.
    assert max(shape[1] for shape in pieces) <= 32
    assert max(np.prod(shape) for shape in pieces) <= 64
  rows = [
    as_lists(
      generate(model, prompts, SamplingOptions(max_tokens=8, temperature=0, prefill_chunk=chunk))
    )
    for chunk in (None, 5, 64)
  ]
  assert rows[0] == rows[1] == rows[2]


@pytest.mark.parametrize("mixer", ["softmax_attention", "lrn"])
def test_padding_is_never_longer_than_a_cache_or_a_table_of_positions(mixer):
  held = {"learned_positions": 12} if mixer == "lrn" else {"mixer_options": {"max_length": 12}}
  model = LanguageModel(
    vocab_size=37, dim=8, num_layers=2, num_heads=2, mixer=mixer, rngs=nnx.Rngs(0), **held
  )
  prompts = [[5, 9, 11, 0, 7, 30, 2, 1, 4], [4]]  # of 16, if they were padded to a power of two
  got = read(model, prompts).logits
  np.testing.assert_allclose(got, read(model, prompts, prefill_chunk=1).logits, atol=1e-5)


def test_prompt_alone_equals_the_batch(model, greedy):
  for prompt, want in zip(PROMPTS[:2], greedy[:2], strict=True):
    (row,) = generate(model, [prompt], SamplingOptions(max_tokens=12, temperature=0))
    assert row.tolist() == want


@pytest.mark.parametrize(
  "options", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-5}, {"temperature": 1e-30}], ids=str
)
def test_sampling_at_its_limits_is_greedy(model, greedy, options):
  assert as_lists(generate(model, PROMPTS, SamplingOptions(max_tokens=12, **options))) == greedy


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 5}], ids=str)
def test_seed_alone_decides_the_text(model, options):
  draw = lambda seed: as_lists(
    generate(model, PROMPTS, SamplingOptions(max_tokens=8, seed=seed, **options))
  )
  assert draw(0) == draw(0)
  assert draw(0) != draw(1)


def test_row_does_not_depend_on_other_prompts(model):
  row_0 = generate(model, PROMPTS, SamplingOptions(max_tokens=8, seed=3))[0]
  np.testing.assert_array_equal(
    generate(model, PROMPTS[:1], SamplingOptions(max_tokens=8, seed=3))[0], row_0
  )


def test_equal_prompts_are_continued_differently(model):
  first, second = generate(model, [[1, 2, 3]] * 2, SamplingOptions(max_tokens=12))
  assert first.tolist() != second.tolist()


def frequencies(draws=4000, **options):
  """How often each token is drawn for the probabilities 0.15, 0.5, 0.05, 0.3."""
  logits = jnp.log(jnp.tile(jnp.array([0.15, 0.5, 0.05, 0.3]), (draws, 1)))
  options = SamplingOptions(max_tokens=1, **options)
  choice, limits = sampling.choice_of(options, 4, False), sampling.limits_of(options)
  keys = jax.random.split(jax.random.key(0), draws)
  seen = jnp.tile(jnp.array([False, True, False, False]), (draws, 1))
  logits = sampling.penalized(logits, seen if choice.penalized else None, limits)
  return np.bincount(sampling.draw(logits, keys, limits, choice), minlength=4) / draws


@pytest.mark.parametrize(
  "options, want",
  [
    ({}, [0.15, 0.5, 0.05, 0.3]),
    ({"temperature": 0.5}, np.array([0.0225, 0.25, 0.0025, 0.09]) / 0.365),
    ({"top_k": 2}, [0, 0.625, 0, 0.375]),
    ({"top_k": 4}, [0.15, 0.5, 0.05, 0.3]),
    ({"top_p": 0.4}, [0, 1, 0, 0]),
    ({"top_p": 0.7}, [0, 0.625, 0, 0.375]),  # 0.5 falls short of 0.7, 0.5 + 0.3 does not
    ({"top_p": 0.9}, [0.15 / 0.95, 0.5 / 0.95, 0, 0.3 / 0.95]),
    ({"min_p": 0.29}, [0.15 / 0.95, 0.5 / 0.95, 0, 0.3 / 0.95]),  # of 0.5: 0.145
    ({"min_p": 0.59, "top_k": 3}, [0, 0.625, 0, 0.375]),
    ({"min_p": 0.4, "top_p": 0.96}, [0, 0.625, 0, 0.375]),
    # Of the temperature's probabilities, 0.25 and 0.09.
    ({"min_p": 0.3, "temperature": 0.5}, [0, 25 / 34, 0, 9 / 34]),
    ({"repetition_penalty": 2.0}, np.array([0.15, 0.25, 0.05, 0.3]) / 0.75),  # 0.5 becomes 0.5^2
    ({"repetition_penalty": 2.0, "temperature": 0}, [0, 0, 0, 1]),
    ({"top_k": 3, "top_p": 0.6}, [0, 0.625, 0, 0.375]),  # p of what k leaves: 0.526, 0.316, 0.158
  ],
  ids=str,
)
def test_tokens_are_drawn_with_their_probabilities(options, want):
  got = frequencies(**options)
  np.testing.assert_array_equal(got == 0, np.equal(want, 0))
  np.testing.assert_allclose(got, want, atol=4 * np.sqrt(0.25 / 4000))  # four standard deviations


def test_row_ends_before_the_stop_token(model, greedy):
  stop = greedy[0][4]
  rows = generate(model, PROMPTS, SamplingOptions(max_tokens=12, temperature=0, stop_token=stop))
  for row, text in zip(rows, greedy, strict=True):
    assert row.tolist() == (text[: text.index(stop)] if stop in text else text)


def test_row_ends_before_the_first_of_several_stop_tokens(model, greedy):
  second = greedy[0][0]  # which ends the first row at once
  stops = (next(token for token in greedy[1] if token != second), second)
  options = SamplingOptions(max_tokens=12, temperature=0, stop_token=list(stops))
  rows = generate(model, PROMPTS, options)
  for row, text in zip(rows, greedy, strict=True):
    ends = [text.index(stop) for stop in stops if stop in text]
    assert row.tolist() == text[: min(ends, default=12)]


def test_seed_of_each_row_decides_its_text_alone(model):
  options = SamplingOptions(max_tokens=8, seed=(3, 5, 3, 7))
  prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0], PROMPTS[1]]
  largest = SamplingOptions(max_tokens=8, seed=(2**32 - 1,))
  assert as_lists(generate(model, [[1]], largest)) == as_lists(
    generate(model, [[1]], dataclasses.replace(largest, seed=2**32 - 1))
  )
  rows = as_lists(generate(model, prompts, options))
  assert rows[0] == rows[2]
  assert rows[1] != rows[3]
  alone = generate(model, [PROMPTS[1]], SamplingOptions(max_tokens=8, seed=5))
  assert as_lists(alone) == [rows[1]]


@pytest.mark.parametrize("penalty", [1.7, 0.6])
def test_repetition_penalty_equals_its_definition_step_by_step(model, penalty):
  """Greedy, with the whole text read again for every token."""
  options = SamplingOptions(max_tokens=6, temperature=0, repetition_penalty=penalty)
  logits_of, want = jax.jit(lambda ids: model(ids)[0]), []
  for prompt in PROMPTS:
    text = list(prompt)
    for _ in range(6):
      logits = np.array(logits_of(np.array([text + [0] * (16 - len(text))])))[0, len(text) - 1]
      for token in set(text):
        logits[token] *= penalty if logits[token] < 0 else 1 / penalty
      text.append(int(logits.argmax()))
    want.append(text[len(prompt) :])
  assert as_lists(generate(model, PROMPTS, options)) == want
  plain = generate(model, PROMPTS, SamplingOptions(max_tokens=6, temperature=0))
  assert want != as_lists(plain)


@pytest.mark.parametrize(
  "options",
  [{"top_k": 3, "temperature": 2.0}, pytest.param({"temperature": 0}, marks=pytest.mark.slow)],
  ids=str,
)
def test_log_probs_are_those_of_the_model_whatever_the_options(model, options):
  options = SamplingOptions(max_tokens=9, seed=1, **options)
  found = generate_scored(model, PROMPTS, options)
  assert as_lists(row.tokens for row in found) == as_lists(generate(model, PROMPTS, options))
  for prompt, row in zip(PROMPTS, found, strict=True):
    text = np.array([[*prompt, *row.tokens]])
    scores = jax.nn.log_softmax(model(text)[0][0], axis=-1)
    want = scores[np.arange(len(prompt) - 1, text.size - 1), row.tokens]
    np.testing.assert_allclose(row.log_probs, want, rtol=1e-4, atol=1e-5)
  stop = int(found[0].tokens[3])
  ended = generate_scored(model, PROMPTS, dataclasses.replace(options, stop_token=stop))
  assert [len(row.tokens) for row in ended] == [len(row.log_probs) for row in ended]
  assert len(ended[0].tokens) <= 3


@pytest.mark.parametrize(
  "lengths", [(0, 3, 1, 3), pytest.param((2, 2, 2, 2), marks=pytest.mark.slow)]
)
def test_start_from_a_text_that_was_read_equals_the_whole_prompt(model, lengths):
  text = [7, 1, 30, 2, 2, 9, 4]
  parts = [text[:length] for length in lengths]
  options = SamplingOptions(max_tokens=8, seed=2, repetition_penalty=1.3, prefill_chunk=2)
  for shared in ([text], [text, text[1:], text[2:], text]):
    whole = [[*before, *part] for before, part in zip(shared * 4, parts, strict=False)]
    start = read(model, shared, prefill_chunk=3)
    got = generate(model, parts, options, start=start)
    assert as_lists(got) == as_lists(generate(model, whole, options))
    np.testing.assert_array_equal(start.length, [len(row) for row in shared])
  longer = read(model, [[5, 6]], start=read(model, [text]))
  assert longer.length.tolist() == [9]
  assert as_lists(generate(model, [[]], options, start=longer)) == as_lists(
    generate(model, [[*text, 5, 6]], options)
  )


def test_second_text_from_a_start_runs_programs_only(model, monkeypatch):
  """Operations run one by one cost the host a tenth of a millisecond each, for every layer."""
  start = read(model, [[7, 1, 30], [2, 2, 9]])
  options = SamplingOptions(max_tokens=4, temperature=0)
  states, _ = generation.apart(start.state, model.num_layers)
  chex.assert_trees_all_equal(states, layers.apart(start.state, model.num_layers))
  first = generate(model, [[], []], options, start=start)
  for name in ("apart", "tied"):
    monkeypatch.setattr(layers, name, None)
  monkeypatch.setattr(jnp, "concatenate", None)
  again = generate(model, [[], []], options, start=start)
  assert as_lists(again) == as_lists(first)


def test_start_of_another_number_of_rows_raises(model):
  start = read(model, [[1], [2]])
  with pytest.raises(ValueError, match="start has 2 rows for 3 prompts"):
    generate(model, [[1]] * 3, SamplingOptions(max_tokens=1), start=start)


def test_length_of_a_row_counts_with_its_own_start():
  """The longest prompt may follow the shortest text that was read."""
  model, start = SimpleNamespace(max_length=12), SimpleNamespace(length=np.array([9, 2]))
  rows = [np.ones(2, int), np.ones(9, int)]
  generation._check_length(model, rows, 2, start)
  with pytest.raises(ValueError, match="max_tokens=3 after a prompt of 11 tokens"):
    generation._check_length(model, rows, 3, start)


def test_stream_repeats_the_stop_token_and_ends_with_the_last_row(model, greedy):
  stop = greedy[0][4]
  steps = list(
    stream(model, PROMPTS[:1] * 2, SamplingOptions(max_tokens=12, temperature=0, stop_token=stop))
  )
  first = greedy[0].index(stop)
  assert len(steps) == first + 1
  assert steps[first].tolist() == [stop, stop]


@pytest.mark.parametrize("started", [False, True])
def test_drawing_keeps_no_second_copy_of_the_state(model, started):
  prompts, options = [[1, 2, 3]] * 11, SamplingOptions(max_tokens=40)  # 11 rows: in no other test
  start = read(model, prompts[:1]) if started else None
  tokens = stream(model, prompts, options, start=start)
  next(tokens)
  gc.collect(1)
  shape = jax.eval_shape(lambda: model.init_state(11)).mixer.h.shape
  assert not [x for x in jax.live_arrays() if x.shape == shape]
  next(tokens)


def test_max_tokens_across_device_calls_agree(model):
  long = generate(model, PROMPTS, SamplingOptions(max_tokens=70, seed=5))
  assert [len(row) for row in long] == [70] * 4
  short = generate(model, PROMPTS, SamplingOptions(max_tokens=33, seed=5))
  for a, b in zip(long, short, strict=True):
    np.testing.assert_array_equal(a[:33], b)


def test_memory_and_programs_do_not_grow_with_the_text(model):
  """One compiled program draws any number of tokens, and what it carries has one size."""
  generate(model, [[1, 2]], SamplingOptions(max_tokens=1, temperature=0))
  programs = generation.decode._cache_size()
  generate(model, [[3] * 40], SamplingOptions(max_tokens=100, temperature=0))
  assert generation.decode._cache_size() == programs
  short, _ = prefill.read_prompts(model, [np.array([1, 2])], 4)
  long, _ = prefill.read_prompts(model, [np.arange(30)], 4)
  assert jax.tree.map(jnp.shape, short) == jax.tree.map(jnp.shape, long)


@pytest.mark.parametrize(
  "prompts, options, message",
  [
    ([], {}, "prompts is empty; give at least one"),
    ([[1], []], {}, r"prompts\[1\] is empty; give at least one token"),
    ("text", {}, "prompts holds text; encode it"),
    (["text"], {}, "prompts holds text; encode it"),
    (None, {}, "prompts=None is no list"),
    (np.array(3), {}, r"prompts=array\(3\) is no list"),
    ([1, 2], {}, r"prompts\[0\] has 0 axes instead of 1"),
    ([[1.0]], {}, r"prompts\[0\] has dtype float64"),
    ([[1], [3, 37]], {}, r"prompts\[1\] holds token ids from 3 to 37.*0 to 36"),
    ([[-1]], {}, r"prompts\[0\] holds token ids from -1"),
    ([[1]], {"max_tokens": 0}, "max_tokens=0 must be"),
    ([[1]], {"prefill_chunk": 0}, "prefill_chunk=0 must be"),
    ([[1]], {"temperature": -0.1}, r"temperature=-0.1 must be 0 \(greedy\) or in 1.2e-38"),
    ([[1]], {"temperature": 1e-39}, "temperature=1e-39 must be 0"),
    ([[1]], {"temperature": float("nan")}, "temperature=nan"),
    ([[1]], {"top_k": 0}, "top_k=0 must be"),
    ([[1]], {"top_k": 38}, "top_k=38 is more than the vocabulary of 37"),
    ([[1]], {"top_p": 0.0}, "top_p=0.0 must be above 0"),
    ([[1]], {"top_p": 1.5}, "top_p=1.5 must be above 0 and at most 1"),
    ([[1]], {"stop_token": 37}, "stop_token=37 is outside the vocabulary, 0 to 36"),
    ([[1]], {"stop_token": (3, -1)}, "stop_token=-1 is outside the vocabulary, 0 to 36"),
    ([[1]], {"stop_token": [3, "x"]}, "stop_token='x' is outside the vocabulary, 0 to 36"),
    ([[1]], {"stop_token": 1.5}, "stop_token=1.5 is outside the vocabulary"),
    ([[1]], {"min_p": 1.5}, "min_p=1.5 must be in 0 to 1"),
    ([[1]], {"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be in 1e-18 to 1e.18"),
    ([[1]], {"repetition_penalty": float("nan")}, "repetition_penalty=nan must be in"),
    ([[1]], {"repetition_penalty": 1e300}, "repetition_penalty=1e.300 must be in"),
    ([[1]], {"temperature": 1e300}, "temperature=1e.300 must be 0 .greedy. or in 1.2e-38"),
    ([[1]], {"seed": (1, 2)}, "seed has 2 numbers for 1 prompts"),
  ],
)
def test_bad_arguments_raise_at_the_call(model, prompts, options, message):
  with pytest.raises(ValueError, match=message):
    stream(model, prompts, SamplingOptions(**{"max_tokens": 4} | options))


def test_options_of_another_type_raise(model):
  options: Any = {"max_tokens": 4}
  with pytest.raises(ValueError, match="is no SamplingOptions; give"):
    stream(model, [[1]], options)


def test_model_without_a_vocabulary_raises():
  with pytest.raises(ValueError, match="model is of the class Linear; give a LanguageModel"):
    stream(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), [[1]], SamplingOptions(max_tokens=1))
