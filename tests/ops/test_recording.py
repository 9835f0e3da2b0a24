"""`ops.recording`: the calls of a block of code, and nothing else of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops
from lnssm_jax.ops.core.recording import observing

X = jax.random.normal(jax.random.key(0), (1, 3, 2, 2))


@pytest.mark.slow
def test_calls_are_recorded_with_arguments_and_defaults():
  plain = ops.linear_attention(X, X, X)[0]
  with ops.recording() as calls:
    out, _ = ops.linear_attention(X, X, v=X, scale=2.0)
  ops.linear_attention(X, X, X)  # not in the block
  (call,) = calls
  assert call.op == "linear_attention"
  assert call.arguments["v"] is X
  assert (call.arguments["scale"], call.arguments["log_decay"]) == (2.0, None)
  np.testing.assert_allclose(out, 2 * 2**0.5 * plain, rtol=1e-6)


def test_op_that_calls_others_is_one_call():
  def both(x, gates):
    indices = jnp.zeros((1, 3, 1), int)
    ops.sparse_state_attention(x, x, x, indices, gates, num_partitions=2, method="mask")
    return ops.linear_attention(x, x, x)

  with ops.recording() as calls:
    jax.eval_shape(both, X, jnp.ones((1, 3, 1)))
  assert [call.op for call in calls] == ["sparse_state_attention", "linear_attention"]


def test_inner_block_has_its_own_calls():
  with ops.recording() as outer:
    with ops.recording() as inner:
      ops.linear_attention(X, X, X)
    ops.diagonal_scan(X[:, :, 0], X[:, :, 0])
  assert ([c.op for c in inner], [c.op for c in outer]) == (["linear_attention"], ["diagonal_scan"])


def test_question_for_implementations_is_no_call():
  with ops.recording() as calls:
    ops.supported(ops.linear_attention, X, X, X)
  assert calls == []


def test_observer_gives_the_results_until_the_end_of_its_block():
  scan = lambda: ops.diagonal_scan(X[:, :, 0], X[:, :, 0])[0]
  plain = scan()

  def twice(call, run):
    out, state = run()
    return 2 * out, state

  with observing(twice):
    np.testing.assert_array_equal(scan(), 2 * plain)
  with pytest.raises(RuntimeError), observing(twice):
    raise RuntimeError
  np.testing.assert_array_equal(scan(), plain)


def test_arguments_named_as_elsewhere_are_told_their_names():
  x = jnp.ones((1, 2, 1, 4))
  with pytest.raises(ValueError, match="linear_attention: no argument 'g'; here it is log_decay"):
    ops.linear_attention(x, x, x, g=jnp.zeros((1, 2, 1)))  # pyrefly: ignore[unexpected-keyword]
  with pytest.raises(TypeError, match="unexpected keyword argument 'g'"):  # it has no decay
    ops.attention(x, x, x, g=jnp.zeros((1, 2, 1)))  # pyrefly: ignore[unexpected-keyword]
