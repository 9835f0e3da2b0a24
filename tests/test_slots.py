"""`lnssm_jax.slots`: texts that join and leave a batch get the tokens that they get alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import generate, sampling, slots
from lnssm_jax.sampling import SamplingOptions
from lnssm_jax.slots import Row, Slots
from tests.pretrained.test_save_model import HYBRID, random_model

WAYS = [
  {"temperature": 0},
  {"top_k": 5, "top_p": 0.9},
  {},
  {"repetition_penalty": 30.0, "top_k": 40},  # tokens of the text are not drawn again
  {"top_p": 0.9},
  {"min_p": 0.1, "temperature": 0.5},
  {"top_k": 1},
  {"top_k": 100},
]
MODELS = {
  "lrn": ({"mixer": "lrn", "num_layers": 1}, 5, WAYS[3:4]),
  "hybrid": (HYBRID, 24, WAYS),
  "cache": (
    {
      "mixer": ("hgrn", "softmax_attention"),  # layers of HGRN share a table
      "mixer_options": {
        "hgrn": {"lower_bound": "shared"},
        "softmax_attention": {"max_length": 100},
      },
    },
    24,
    WAYS,
  ),
}


def alone(model, row):
  (tokens,) = np.stack(
    list(generate.stream(model, [row.prompt], row.options, numbers=[row.number])), axis=1
  )
  return sampling.before_stop(tokens, row.options.stop_token).tolist()


def test_rows_of_several_options_draw_what_each_draws_alone():
  """From the same logits and with the same keys, whatever limits the others have."""
  options = [SamplingOptions(max_tokens=1, **way) for way in WAYS[::2]]
  choices = [sampling.choice_of(each, 100, False) for each in options]
  logits = jnp.asarray(np.random.default_rng(0).normal(size=(20, 1, 100)), jnp.float32)
  limits = [sampling.limits_of(each) for each in options]
  of_rows = sampling.Limits(*(np.stack(x)[:, None] for x in zip(*limits, strict=True)))
  keys = sampling.row_keys(0, 20)[:, None]
  choice = sampling.common_choice(choices, 100)

  @jax.jit
  def together(key, logits):
    logits, keys = jnp.repeat(logits, len(options), 0), jnp.repeat(key, len(options))
    return sampling.draw(logits, keys, of_rows, choice)

  got = np.array([together(*row) for row in zip(keys, logits, strict=True)])
  for number, (own, alone) in enumerate(zip(limits, choices, strict=True)):
    want = sampling.draw(logits[:, 0], keys[:, 0], own, alone)
    np.testing.assert_array_equal(got[:, number], want, err_msg=str(options[number]))


@pytest.mark.parametrize(
  "name", ["lrn", *(pytest.param(name, marks=pytest.mark.slow) for name in ("hybrid", "cache"))]
)
def test_rows_that_join_and_leave_get_the_tokens_of_generate(name):
  """Also of shared beginnings, whose state is reused, next to rows that are given up."""
  settings, count, ways = MODELS[name]
  model, rng = random_model(**settings), np.random.default_rng(0)
  shared, rows = rng.integers(0, 257, 16), []
  for number in range(count):
    prompt = rng.integers(0, 257, rng.integers(1, 4 if name == "lrn" else 40))
    options = SamplingOptions(
      max_tokens=int(rng.integers(1, 40)),
      seed=number // 2,
      stop_token=(7, 9),
      **ways[number % len(ways)],
    )
    rows.append(Row(np.append(shared, prompt) if number % 2 else prompt, options, number % 3))
  rows.append(Row(rows[1].prompt, rows[1].options, 1))  # the same prompt once more
  given_up = Row(shared, SamplingOptions(max_tokens=10**9 if name == "lrn" else 60))
  slots, waiting, most = Slots(model, 3), [given_up, *rows], 0
  found, ended = {row: [] for row in waiting}, {}
  while waiting or slots.rows:
    while waiting and slots.free:
      slots.add(waiting.pop(0))
    most = max(most, len(slots.rows))
    for row, tokens, reason in slots.step():
      assert row not in ended
      found[row] += tokens
      given_up.cancelled |= len(found[given_up]) >= 16
      if reason:
        ended[row] = reason
  assert given_up not in ended and 16 <= len(found[given_up]) < 24
  assert most > 3  # a text begins while the last tokens of the one before it are drawn
  for row in rows:
    assert found[row] == alone(model, row)
    want = "length" if len(found[row]) == row.options.max_tokens else "stop"
    assert ended[row] == want
  assert {row.reused for row in rows} >= {0, 16, len(rows[1].prompt)}


def test_memory_of_prefixes_is_bounded():
  """States that were used least recently leave first."""
  model = random_model(mixer="lrn", num_layers=1)
  rows = [Row(np.full(16, token), SamplingOptions(max_tokens=1, temperature=0)) for token in b"abc"]
  slots = Slots(model, 1, prefix_memory=3000)  # room for two states of 64 and logits of 1,028 bytes
  for number in (0, 1, 0, 2, 1, 2):
    row = Row(rows[number].prompt, rows[number].options)
    slots.add(row)
    while slots.rows:
      slots.step()
    assert 0 < slots.prefix_bytes <= 3000
    rows.append(row)
  assert [row.reused for row in rows[3:]] == [0, 0, 16, 0, 0, 16]
  slots = Slots(model, 1)
  for shared, reused in ((15, 0), (16, 16)):  # what two texts have in common is kept for the third
    for end in b"abc":
      prompt = np.append(np.full(shared, shared), np.full(17 - shared, end))
      slots.add(row := Row(prompt, rows[0].options))
      while slots.rows:
        slots.step()
    assert row.reused == reused


def test_nan_ends_its_row_alone():
  model = random_model(mixer="lrn", num_layers=1)
  model.embedding[...] = jnp.asarray(model.embedding[...]).at[5].set(np.nan)
  slots = Slots(model, 2)
  options = SamplingOptions(max_tokens=4, temperature=0, stop_token=5)
  bad, good = Row(np.array([5]), options), Row(np.array([6]), options)
  slots.add(bad)
  slots.add(good)
  with pytest.raises(ValueError, match="all 2 slots are taken"):
    slots.add(good)
  found = {row: (tokens, ended) for row, tokens, ended in slots.step()}
  assert found[bad] == ([], "nan") and found[good][1] in ("length", "stop")
  assert found[good][0] == alone(model, good)


@pytest.fixture(scope="module")
def idle():
  """One slot, for steps one by one."""
  return Slots(random_model(mixer="lrn", num_layers=2), 1)


def test_layers_have_their_own_parameters_apart(idle):
  for number, parts in enumerate(idle._weights):
    for got, stacked in zip(parts, jax.tree.leaves(idle.model.blocks), strict=True):
      np.testing.assert_array_equal(got, stacked[number])


class Called(Exception):
  """Raised in place of a call of the device, with its arguments."""


def call(*arguments, **_):
  raise Called(*arguments)


@pytest.mark.parametrize(
  ("broken", "tokens", "ended"),
  [([1], [3], "nan"), ([2], [3, 4], "nan"), ([3], [3, 4], "stop"), ([], [3, 4], "stop")],
)
def test_nan_counts_up_to_the_token_that_ends_a_row(idle, broken, tokens, ended):
  """Also in that one, which NaN may have made."""
  row = Row(np.array([1]), SamplingOptions(max_tokens=9, stop_token=5))
  idle.rows.append(row)
  found = idle._of_row(row, np.array([3, 4, 5, 6]), np.isin(np.arange(4), broken))
  assert found[1:] == (tokens, ended) and row.drawn == len(tokens) and not idle.rows


def test_prompt_is_read_in_pieces_that_a_cache_holds(idle, monkeypatch):
  monkeypatch.setattr(type(idle.model), "max_length", 5)
  monkeypatch.setattr(idle, "_extend", call)
  idle.add(Row(np.arange(5), SamplingOptions(max_tokens=1)))
  with pytest.raises(Called) as called:
    idle.step()
  (row,), size, counts = called.value.args
  assert (size, counts) == (5, [5])
  idle._leave(row)


def test_row_draws_by_its_own_seed_and_by_limits_that_stay_as_they_are(idle, monkeypatch):
  """A seed of a row alone is without its number; the host fills its arrays while calls wait."""
  monkeypatch.setattr(slots, "_put", call)
  monkeypatch.setattr(slots, "decode", call)
  for seed, want in ((7, (7, 3)), ((7,), (7, 0))):
    row = Row(np.array([1]), SamplingOptions(max_tokens=9, seed=seed), 3)
    with pytest.raises(Called) as called:
      idle._begin([(row, slots._Read(None, None, 0))])
    assert tuple(int(x[0]) for x in called.value.args[4]) == want
    with pytest.raises(Called) as called:
      idle._draw()
    limits = called.value.args[7]
    assert not any(map(np.shares_memory, limits, idle._limits))
    idle._free.append(idle._drawing.pop(row).slot)


@pytest.fixture(scope="module")
def batch():
  return Slots(random_model(mixer="lrn", num_layers=1), 20)


@pytest.fixture
def calls(monkeypatch):
  """The calls of the device, which are only counted: logits are the number of a call."""
  calls = []

  def decode(model, weights, states, logits, seen, keys, first, limits, *, choice, steps):
    calls.append(f"draw {steps}")
    drawn = steps, len(first)
    return states, logits, seen, (np.ones(drawn, int), None, np.zeros(drawn, bool))

  def extend(model, states, tokens, starts):
    calls.append(f"read {len(tokens)}")
    return list(states), [len(calls)] * len(tokens)

  monkeypatch.setattr(slots, "decode", decode)
  monkeypatch.setattr(slots, "_extend_rows", extend)
  monkeypatch.setattr(slots, "_put", lambda batch, *_: batch)
  monkeypatch.setattr(slots, "_bytes", lambda _: 0)
  return calls


def test_prompt_waits_neither_for_longer_ones_nor_for_all_of_them(calls, batch, monkeypatch):
  """A piece of each is read in each step, one ahead of the device while nothing is drawn."""
  waited, options = [], SamplingOptions(max_tokens=1)
  monkeypatch.setattr(jax, "block_until_ready", waited.append)
  monkeypatch.setattr(slots, "default_prefill_chunk", lambda _: 4)
  batch.add(Row(np.arange(30), options))
  assert [*batch.step(), *batch.step()] == [] and waited == [[], [2]] and len(calls) == 3
  batch.add(short := Row(np.array([50]), options))
  batch._since = 99
  assert [drawn.row for drawn in batch.step()] == [short]
  assert calls[3:] == ["read 1", "read 1", "draw 2"]  # no more tokens than it asks for, or one
  while batch.rows:
    batch.step()


def test_text_that_comes_soon_after_another_has_left_joins_soon_and_with_others(calls, batch):
  """By calls of two tokens and not eight, after at most one of them for other prompts to come."""
  prompts = iter(range(99))

  def add(*lengths):
    for length in lengths:
      batch.add(Row(np.array([next(prompts)]), SamplingOptions(max_tokens=length)))

  def step():
    calls.clear()
    batch.step()
    return calls

  add(*[1000] * 19, 42)
  draws = ["draw 2"] * 4
  assert step() == ["read 20", *draws, *draws]  # no slot is empty
  for _ in range(4):
    assert step() == draws
  assert step() == ["draw 2"]  # that of the one whose last tokens are drawn
  add(1000)
  assert step() == ["read 1", *draws]
  while batch._since < 32:
    assert step() == draws
  for row in batch.rows[:3]:
    row.cancelled = True
  assert step() == ["draw 2"]
  add(1000)
  assert step() == ["draw 2"]  # other places are empty
  assert step() == ["read 1", "draw 2"]
  while batch._since < 32:
    assert step() == ["draw 2"]
  for _ in range(2):  # texts wait for no others when the next call is long, or the last was
    add(1000)
    assert step() == ["read 1", *draws]


def test_state_that_memory_cannot_hold_leaves_the_others_there():
  prefixes, prompt = slots._Prefixes(100), np.arange(20)
  for length, size in ((1, 10), (2, 101), (3, 10)):
    prefixes.keep(prompt, slots._Read(None, np.zeros(size, np.uint8), length))
  assert prefixes.used == 20
  assert [prefixes.longest(prompt[:n]).length for n in (1, 2, 3)] == [1, 1, 3]
