"""The contract of every mixer: one suite for all of them, two compiled programs per mixer.

A third one has the gradients, of the mixers of `CORE` by default: it takes longer than both.
"""

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import MIXERS
from lnssm_jax.mixers.common.lengths import run_rows
from tests.mixers import initial_values, tiny
from tests.mixers.helpers import apply, relative_error, split
from tests.mixers.tiny import DIM, TINY, core_mixers, expected, initial, randomized, starting
from tests.narrow_arithmetic import narrow_arithmetic

B, T = 2, 7
DOCUMENTS = (3, 1, 3)
SEGMENT_IDS = np.repeat([[4, 2, 4]] * B, DOCUMENTS, axis=1)  # an earlier id starts a new document

# The scope groups the tests by mixer, so that one process compiles its programs once.
every_mixer = pytest.mark.parametrize("name", list(MIXERS), scope="module")
every_core_mixer = pytest.mark.parametrize("name", core_mixers(), scope="module")

# Their W_o is zero at first, as in the published code.
STARTS_AT_ZERO = {"lnssm", "rwkv4", "rwkv5", "rwkv6", "rwkv7"}

# What is computed in `dtype` next to products of matrices and of two numbers: all else is float32.
IN_DTYPE = {"lnssm": {"logistic"}, "rwkv6": {"tanh"}}


class Results(NamedTuple):
  """Results of `evaluate`."""

  out: jax.Array
  state: Any
  packed: tuple[jax.Array, Any]  # with SEGMENT_IDS, after a state


def evaluate(mixer, x, before, segment_ids=SEGMENT_IDS) -> Results:
  """Runs a call without state, and a packed call after the state `before`."""
  return _evaluate(mixer, x, before, jnp.asarray(segment_ids, jnp.int32))


@jax.jit
def _evaluate(mixer, x, before, segment_ids) -> Results:
  return Results(*mixer(x), mixer(x, before, segment_ids))


@jax.jit
def loss_and_gradients(mixer, x):
  """Of a call without state, from all that it returns."""
  loss = lambda mixer, x: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(mixer(x)))
  return jax.value_and_grad(loss, (0, 1))(mixer, x)


def inputs(B: int, T: int, *, seed: int = 1) -> jax.Array:
  """x [B, T, DIM] float32, normal; every fifth token so small that the epsilons of norms show."""
  small = jnp.arange(T) % 5 == 3
  return tiny.inputs(B, T, seed=seed) * jnp.where(small, 3e-3, 1.0)[:, None]


@functools.cache
def random_mixer(name):
  return randomized(name)


@functools.cache
def one_token(name):
  """A program of (mixer, x [B, 1, DIM], state). No state that it returns makes it compile again."""
  chex.clear_trace_counter()  # it counts by source text
  return jax.jit(chex.assert_max_traces(lambda mixer, x, state: mixer(x, state), n=1))


@functools.cache
def state_before(name):
  """The state after one token of another sequence."""
  mixer = random_mixer(name)
  return one_token(name)(mixer, inputs(B, 1, seed=9), mixer.init_state(B))[1]


@functools.cache
def results(name) -> Results:
  return evaluate(random_mixer(name), inputs(B, T), state_before(name))


def decode(name, x, state):
  """One token at a time from `state`."""
  outputs = []
  for t in range(x.shape[1]):
    out, state = one_token(name)(random_mixer(name), x[:, t : t + 1], state)
    outputs.append(out)
  return jnp.concatenate(outputs, axis=1), state


def assert_same(got, want):
  """Outputs and states agree to a few roundings of float32."""
  (out, state), (want_out, want_state) = got, want
  assert relative_error(out, want_out) < 2e-6
  chex.assert_trees_all_close(state, want_state, rtol=1e-5, atol=1e-5)


def test_table_of_tiny_mixers_is_complete():
  assert TINY.keys() == MIXERS.keys()


@every_mixer
def test_initial_parameters_have_the_recorded_sizes(name):
  """Tensor by tensor: a gain, an epsilon or another random number would change them.

  After a change that is meant to change them: python -m tests.mixers.initial_values
  """
  got, want = initial_values.of(split(starting(name))[1]), initial_values.recorded()[name]
  np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-7)


@every_core_mixer
def test_initial_output_is_neither_silent_nor_loud(name):
  """For inputs of size 1, as the norm before a mixer makes them; by design some start at 0.

  The smallest have kernels of size 0.02 whatever the width, here 8: a product of three of them.
  """
  out = evaluate(starting(name), tiny.inputs(B, T), state_before(name)).out
  size = np.sqrt(np.mean(np.square(out)))
  assert size == 0 if name in STARTS_AT_ZERO else 1e-5 < size < 3, size


@every_mixer
def test_output_matches_float64_reference(name):
  want = expected(name, random_mixer(name), inputs(B, T))
  assert relative_error(results(name).out, want) < 2e-6


@every_mixer
def test_output_does_not_depend_on_later_tokens(name):
  out = results(name).out
  for t in (1, 4, T - 1):
    x = inputs(B, T).at[:, t].add(100.0)
    disturbed = evaluate(random_mixer(name), x, state_before(name)).out
    # Mamba-3 multiplies what a token has of its own by a weight in which its successor counts, and
    # divides by it: as much as that rounds, it shows.
    rounding = 1e-6 if name == "mamba3" else 0
    np.testing.assert_allclose(disturbed[:, :t], out[:, :t], rtol=rounding)
    assert not np.array_equal(disturbed[:, t], out[:, t])


@every_mixer
def test_decoding_equals_one_call(name):
  got = decode(name, inputs(B, T), random_mixer(name).init_state(B))
  assert_same(got, (results(name).out, results(name).state))


@every_mixer
def test_packed_documents_equal_separate_ones(name):
  empty, outputs, state = random_mixer(name).init_state(B), [], None
  documents = jnp.split(inputs(B, T), np.cumsum(DOCUMENTS)[:-1], axis=1)
  for document, before in zip(documents, (state_before(name), empty, empty), strict=True):
    out, state = decode(name, document, before)
    outputs.append(out)
  assert_same(results(name).packed, (jnp.concatenate(outputs, axis=1), state))


@every_core_mixer
def test_rows_of_a_padded_batch_end_as_if_alone(name):
  """With the program of the other tests; `test_lengths.py` has the call itself, of all mixers."""
  mixer, x, lengths = random_mixer(name), inputs(B, T), (5, 2)
  empty = mixer.init_state(B)
  run = lambda x, state, segment_ids: evaluate(mixer, x, empty, segment_ids).packed
  out, state = run_rows(name, run, x, None, None, jnp.array(lengths), empty)
  for row, length in enumerate(lengths):
    want, last = decode(name, x[:, :length], empty)
    assert not out[row, length:].any()
    of_row = lambda tree, row=row: jax.tree.map(lambda leaf: np.asarray(leaf)[row], tree)
    assert_same(of_row((out[:, :length], state)), of_row((want, last)))


@every_core_mixer
def test_gradients_are_finite(name):
  """At initialization, and for inputs a thousand times too large."""
  start = starting(name)
  for mixer, size in ((start, 1), (start, 1e3), (random_mixer(name), 1e3)):
    chex.assert_tree_all_finite(loss_and_gradients(mixer, size * inputs(B, T)))


@every_core_mixer
def test_split_sequence_equals_one_call(name):
  """Also with pieces of several tokens after a state."""
  state, outputs = random_mixer(name).init_state(B), []
  for piece in jnp.split(inputs(B, T), np.cumsum(DOCUMENTS)[:-1], axis=1):
    run = one_token(name) if piece.shape[1] == 1 else apply
    out, state = run(random_mixer(name), piece, state)
    outputs.append(out)
  want = (results(name).out, results(name).state)
  assert_same((jnp.concatenate(outputs, axis=1), state), want)


@every_core_mixer
def test_bfloat16_is_within_a_few_roundings(name):
  mixer, x = randomized(name, dtype=jnp.bfloat16), inputs(B, T).astype(jnp.bfloat16)
  out, _ = apply(mixer, x)
  assert relative_error(out, expected(name, mixer, x)) < 4 * 2**-8


def mixers_and_dtypes():
  """bfloat16 for every mixer, the other dtypes for the one with most parts; the rest is slow."""
  for name in MIXERS:
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
      slow = dtype != jnp.bfloat16 and name != "lnssm"
      yield pytest.param(name, dtype, marks=[pytest.mark.slow] * slow)


@pytest.mark.parametrize("name, dtype", list(mixers_and_dtypes()))
def test_dtypes_and_shapes_are_as_promised(name, dtype):
  mixer = jax.eval_shape(lambda: initial(name, dtype=dtype))
  program, (out, state) = jax.make_jaxpr(apply, return_shape=True)(
    mixer, inputs(B, 6).astype(dtype)
  )
  assert (out.shape, out.dtype) == ((B, 6, DIM), dtype)
  chex.assert_trees_all_equal_shapes_and_dtypes(state, mixer.init_state(B))
  for leaf in jax.tree.leaves(state):
    # Sums need float32. A cache, which is only read again, has no more digits than dtype.
    assert leaf.dtype in (jnp.float32, jnp.int32) or (TINY[name].cache and leaf.dtype == dtype)
  assert {leaf.dtype for leaf in jax.tree.leaves(mixer)} == {jnp.dtype(jnp.float32)}
  allowed = {"mul"} | IN_DTYPE.get(name, set())
  assert dtype == jnp.float32 or narrow_arithmetic(program) <= allowed
  small = jax.eval_shape(lambda: initial(name, param_dtype=dtype))
  assert {leaf.dtype for leaf in jax.tree.leaves(small)} == {jnp.dtype(dtype)}


@every_core_mixer
def test_transformations_equal_plain_calls(name):
  """Two layers scanned, each recomputed in the backward pass, mapped over two batches."""
  layers = (starting(name), random_mixer(name))
  stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)

  @jax.jit
  @jax.vmap
  def run(x):
    body = jax.checkpoint(lambda x, mixer: (x + mixer(x)[0], None))
    return jax.lax.scan(body, x, stacked)[0]

  batches = jnp.stack([inputs(B, T), inputs(B, T, seed=2)])
  want = batches
  for mixer in layers:
    calls = [evaluate(mixer, x, state_before(name)).out for x in want]
    want = want + jnp.stack(calls)
  assert relative_error(run(batches), want) < 2e-6


@every_mixer
def test_bad_inputs_raise_with_the_argument_named(name):
  mixer = jax.eval_shape(functools.partial(initial, name))
  x, shape = jnp.ones((B, 5, DIM)), jax.ShapeDtypeStruct
  assert {leaf.shape[0] for leaf in jax.tree.leaves(mixer.init_state(11))} == {11}  # rows first
  state = jax.tree.map(lambda s: shape((3, *s.shape[1:]), s.dtype), mixer.init_state(B))
  wrong = {
    r"x has shape \(5, 8\)": (x[0],),
    r"x has shape \(2, 5, 7\)": (x[..., 1:],),
    "x has dtype int32": (x.astype(int),),
    r"x is a list; give an array, jnp\.asarray": (x.tolist(),),
    "at least one token": (x[:, :0],),
    r"state\S+ has shape \(3,": (x, state),
    r"state has the structure dict\(\['kv'\]\), but its own is \w": (x, {"kv": x}),
    r"segment_ids has shape \(2, 4\)": (x, None, jnp.ones((B, 4), int)),
    "segment_ids has dtype float32": (x, None, jnp.ones((B, 5))),
  }
  for message, arguments in wrong.items():
    with pytest.raises(ValueError, match=f"{MIXERS[name].__name__}: .*{message}"):
      mixer(*arguments)
  with pytest.raises(ValueError, match="batch_size=0"):
    mixer.init_state(0)
  with pytest.raises(ValueError, match="dim=0"):
    MIXERS[name](0, **TINY[name].options, rngs=nnx.Rngs(0))


@every_mixer
def test_arguments_set_by_a_model_are_declared(name):
  taken = MIXERS[name].__init__.__annotations__
  names = ("num_heads", "layer", "num_layers")
  assert MIXERS[name].set_by_model == tuple(argument for argument in names if argument in taken)
