"""Right-padded batches: `lengths` of the rows, in the call of a mixer.

From the start of a sequence `test_contract.py` has them by default, with no new program; here is
the call itself, after a state and with documents too.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax.mixers import MIXERS, shard_time
from lnssm_jax.mixers.common.lengths import run_rows
from tests.mixers.helpers import relative_error
from tests.mixers.tiny import DIM, inputs, randomized

LENGTHS = np.array([6, 4, 0, 3])
B, T = len(LENGTHS), 6
REAL = jnp.arange(T) < LENGTHS[:, None]
X = jnp.where(REAL[..., None], inputs(B, T), jnp.nan)  # padding may hold anything
SEGMENT_IDS = jnp.array([[3, 3, 5, 5, 5, 5], [1, 2, 2, 2, 9, 9], [1] * T, [2, 2, 7, 7, 8, 8]])
CASES = {"start": (False, None), "state_and_documents": (True, SEGMENT_IDS)}


@jax.jit
def padded(mixer, state, segment_ids, lengths, x=X):
  def loss(mixer, x):
    y, last = mixer(x, state, segment_ids, lengths=lengths)
    return jnp.sum(jnp.sin(y)), (y, last)

  (_, results), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(mixer, x)
  return results, gradients


one_token = jax.jit(lambda mixer, x, state: mixer(x, state))


def alone(mixer, row, state, segment_ids):
  """(y [1, T, D], the last state) of the tokens of one row, one by one."""
  empty, outputs = mixer.init_state(1), []
  state = empty if state is None else jax.tree.map(lambda leaf: leaf[row][None], state)
  for t in range(LENGTHS[row]):
    if segment_ids is not None and t and segment_ids[row, t] != segment_ids[row, t - 1]:
      state = empty
    y, state = one_token(mixer, X[row : row + 1, t : t + 1], state)
    outputs.append(y)
  return jnp.concatenate(outputs, 1) if outputs else jnp.zeros((1, 0, DIM)), state


def names_and_cases():
  for name in MIXERS:
    for case in CASES:
      slow = name != "lrn" or case == "start"  # it compiles fastest
      yield pytest.param(name, case, marks=[pytest.mark.slow] * slow)


@pytest.mark.parametrize(("name", "case"), list(names_and_cases()))
def test_rows_equal_each_row_alone_and_continue_from_their_states(name, case):
  mixer, (continued, segment_ids) = randomized(name), CASES[case]
  state = mixer.init_state(B)
  if continued:
    state = one_token(mixer, inputs(B, 1, seed=9), state)[1]
  before = state if continued else None
  (y, last), (of_mixer, of_x) = padded(mixer, before, segment_ids, jnp.asarray(LENGTHS))
  for row, length in enumerate(LENGTHS):
    want, want_state = alone(mixer, row, before, segment_ids)
    assert not y[row, length:].any()
    if length:
      assert relative_error(y[row, :length], want[0]) < 2e-6
    own = jax.tree.map(lambda leaf, row=row: leaf[row][None], last)
    chex.assert_trees_all_close(own, want_state, rtol=1e-5, atol=1e-5)
    after = [one_token(mixer, jnp.ones((1, 1, DIM)), state)[0] for state in (own, want_state)]
    assert relative_error(*after) < 1e-5
  chex.assert_tree_all_finite((of_mixer, of_x))
  assert not of_x[~np.asarray(REAL)].any()


def test_lengths_outside_are_clipped_where_they_are_not_known():
  mixer, x = randomized("lrn"), inputs(2, T)
  run = jax.jit(lambda mixer, lengths: mixer(x, lengths=lengths))
  chex.assert_trees_all_equal(run(mixer, jnp.array([-3, 99])), run(mixer, jnp.array([0, T])))


def test_calls_after_a_state_read_each_token_twice_at_most():
  sizes = []

  def run(x, state, segment_ids):
    sizes.append(x.shape[1])
    return x, state

  state, lengths = jnp.zeros((2, 1)), jnp.array([100, 3])
  jax.eval_shape(
    lambda x: run_rows("run", run, x, state, None, lengths, state), jnp.ones((2, 100, 1))
  )
  assert sizes == [64, 32, 16, 8, 4, 2, 1]


def test_bad_lengths_raise_and_are_named():
  mixer, x = randomized("lrn"), inputs(2, T)
  wrong = {
    r"LRN: lengths has shape \(3,\), but \[B\] = \[2\]": jnp.ones(3, int),
    "LRN: lengths has dtype float32; it must be integer": jnp.ones(2),
    "LRN: lengths has the value 8; it counts the tokens of a row, from 0 to T=6": [8, 1],
    "LRN: lengths has the value 7; it counts the tokens of a row, from 0 to T=6": np.array([7, 1]),
    "LRN: lengths has the value -1": jnp.array([2, -1]),
  }
  for message, lengths in wrong.items():
    with pytest.raises(ValueError, match=message):
      mixer(x, lengths=lengths)
  with pytest.raises(ValueError, match="LRN: lengths and dropout_key are both given"):
    mixer(x, lengths=jnp.ones(2, int), dropout_key=jax.random.key(0))
  with pytest.raises(NotImplementedError, match=r"LRN: lengths of a sequence.*'time'.*not support"):
    shard_time(randomized("lrn"), "time")(x, lengths=jnp.ones(2, int))


def test_length_beyond_the_cache_raises_and_padding_beyond_it_does_not():
  mixer, x = randomized("softmax_attention"), inputs(1, 40)
  call = lambda length: jax.eval_shape(lambda: mixer(x, lengths=np.array([length])))
  call(32)
  with pytest.raises(ValueError, match=r"SoftmaxAttention: x has 33 tokens.*max_length=32"):
    call(33)
