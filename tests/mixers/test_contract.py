"""What every mixer promises, one suite for all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax.mixers import MIXERS
from tests.mixers.plain_lnssm import apply, relative_error
from tests.mixers.tiny import DIM, TINY, expected, initial, inputs, one_of_each_family, randomized

B, T = 2, 21
CUTS = (10, 11)  # pieces of 10, 1 and 10 steps: no further program but that of decoding

every_mixer = pytest.mark.parametrize("name", list(MIXERS))
every_family = pytest.mark.parametrize("name", one_of_each_family())


@functools.cache
def random_mixer(name):
  return randomized(name)


@functools.cache
def whole(name):
  """(out, state) of one call for `inputs(B, T)`."""
  return apply(random_mixer(name), inputs(B, T))


def in_pieces(name, cuts, states):
  """Calls on the pieces of `inputs(B, T)`; each begins with its own state, or the last for None."""
  outputs, state = [], None
  for piece, own in zip(jnp.split(inputs(B, T), cuts, axis=1), states, strict=True):
    out, state = apply(random_mixer(name), piece, state if own is None else own)
    outputs.append(out)
  return jnp.concatenate(outputs, axis=1), state


def assert_same(got, want):
  """Outputs and states agree to a few roundings of float32."""
  (out, state), (want_out, want_state) = got, want
  assert relative_error(out, want_out) < 2e-6
  assert jax.tree.structure(state) == jax.tree.structure(want_state)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
  jax.tree.map(close, state, want_state)


def test_every_mixer_is_in_the_table():
  assert TINY.keys() == MIXERS.keys()


@every_mixer
def test_matches_its_equations(name):
  out, _ = whole(name)
  assert relative_error(out, expected(name, random_mixer(name), inputs(B, T))) < 2e-6


@every_family
def test_bfloat16_is_within_a_few_roundings(name):
  mixer, x = randomized(name, dtype=jnp.bfloat16), inputs(B, T).astype(jnp.bfloat16)
  out, _ = apply(mixer, x)
  assert relative_error(out, expected(name, mixer, x)) < 4 * 2**-8


@every_mixer
def test_no_output_depends_on_a_later_token(name):
  out, _ = whole(name)
  for t in (1, 11, T - 1):
    disturbed, _ = apply(random_mixer(name), inputs(B, T).at[:, t].add(100.0))
    np.testing.assert_array_equal(disturbed[:, :t], out[:, :t])
    assert not np.array_equal(disturbed[:, t], out[:, t])


@every_family
def test_splitting_a_sequence_changes_nothing(name):
  empty = random_mixer(name).init_state(B)
  assert_same(in_pieces(name, CUTS, (empty, None, None)), whole(name))


@every_mixer
def test_one_token_at_a_time_equals_one_call(name):
  states = (random_mixer(name).init_state(B), *[None] * (T - 1))
  assert_same(in_pieces(name, tuple(range(1, T)), states), whole(name))


@every_mixer
def test_packed_documents_equal_separate_ones(name):
  mixer = random_mixer(name)
  empty = mixer.init_state(B)
  _, before = apply(mixer, inputs(B, 1, seed=9), empty)
  segment_ids = np.repeat([[4, 2, 4]] * B, [10, 1, 10], axis=1)
  packed = apply(mixer, inputs(B, T), before, segment_ids)
  assert_same(packed, in_pieces(name, CUTS, (before, empty, empty)))


@every_mixer
def test_gradients_are_finite(name):
  """At initialisation, and for inputs a thousand times too large."""

  @jax.jit
  @functools.partial(jax.value_and_grad, argnums=(0, 1))
  def loss(mixer, x):
    out, state = mixer(x)
    return sum(jnp.sum(jnp.sin(leaf)) for leaf in (out, *jax.tree.leaves(state)))

  for mixer, size in ((initial(name), 1), (initial(name), 1e3), (random_mixer(name), 1e3)):
    value, gradients = loss(mixer, size * inputs(B, T))
    assert np.isfinite(value)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
      assert np.isfinite(gradient).all(), (size, jax.tree_util.keystr(path))


@every_mixer
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtypes_and_shapes(name, dtype):
  mixer = jax.eval_shape(lambda: initial(name, dtype=dtype))
  out, state = jax.eval_shape(apply, mixer, inputs(B, 6).astype(dtype))
  assert (out.shape, out.dtype) == ((B, 6, DIM), dtype)
  empty = mixer.init_state(B)
  assert jax.tree.structure(state) == jax.tree.structure(empty)
  for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(empty), strict=True):
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    # Sums need float32. What is only kept to be read again, a cache, has no more digits than dtype.
    assert got.dtype in (jnp.float32, jnp.int32) or (TINY[name].cache and got.dtype == dtype)
  assert {leaf.dtype for leaf in jax.tree.leaves(mixer)} == {jnp.dtype(jnp.float32)}
  small = jax.eval_shape(lambda: initial(name, param_dtype=dtype))
  assert {leaf.dtype for leaf in jax.tree.leaves(small)} == {jnp.dtype(dtype)}


@every_family
def test_under_jit_vmap_scan_and_checkpoint(name):
  """Two layers scanned, each recomputed in the backward pass, mapped over two batches."""
  layers = (initial(name), random_mixer(name))
  stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)

  @jax.jit
  @jax.vmap
  def run(x):
    body = jax.checkpoint(lambda x, mixer: (x + mixer(x)[0], None))
    return jax.lax.scan(body, x, stacked)[0]

  batches = jnp.stack([inputs(B, T), inputs(B, T, seed=2)])
  want = batches
  for mixer in layers:
    want = want + jnp.stack([apply(mixer, x)[0] for x in want])
  assert relative_error(run(batches), want) < 2e-6


@every_mixer
def test_bad_inputs_are_named(name):
  mixer, x = random_mixer(name), jnp.ones((B, 5, DIM))
  class_name = MIXERS[name].__name__
  wrong = {
    r"x has shape \(5, 8\)": (x[0],),
    r"x has shape \(2, 5, 7\)": (x[..., 1:],),
    "x has dtype int32": (x.astype(int),),
    "at least one token": (x[:, :0],),
    r"state\S+ has shape \(3,": (x, mixer.init_state(3)),
    "state has the structure": (x, {"kv": x}),
    r"segment_ids has shape \(2, 4\)": (x, None, jnp.ones((B, 4), int)),
  }
  for message, arguments in wrong.items():
    with pytest.raises(ValueError, match=f"{class_name}: .*{message}"):
      mixer(*arguments)
  with pytest.raises(ValueError, match="batch_size=0"):
    mixer.init_state(0)
  with pytest.raises(ValueError, match="dim=0"):
    MIXERS[name](0, **TINY[name].options, rngs=None)
