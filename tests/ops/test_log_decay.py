"""Decays that would let a state grow, in calls whose values are known."""

import jax
import jax.numpy as jnp
import pytest

from lnssm_jax import ops

Q = jnp.ones((1, 3, 2, 4))
CALLS = {
  "linear_attention": lambda decay: ops.linear_attention(Q, Q, Q, log_decay=decay),
  "delta_rule": lambda decay: ops.delta_rule(Q, Q, Q, Q[..., 0], log_decay=decay),
  "elementwise_decay_scan": lambda decay: ops.elementwise_decay_scan(
    Q, Q, Q, jnp.broadcast_to(decay[..., None, None], (1, 3, 2, 4, 4))
  ),
}


@pytest.mark.parametrize("name", CALLS)
def test_positive_log_decay_raises_in_eager_calls(name):
  decay = jnp.zeros((1, 3, 2)).at[0, 1, 1].set(0.9)
  with pytest.raises(ValueError, match=rf"{name}: log_decay has the value 0\.9.*jnp\.log\(factor"):
    CALLS[name](decay)
  jax.eval_shape(CALLS[name], decay)  # not known here


def test_positive_decay_of_values_raises_naming_it():
  with pytest.raises(ValueError, match=r"linear_attention: value_log_decay has the value 0\.5"):
    ops.linear_attention(Q, Q, Q, value_log_decay=jnp.full((2, 4), 0.5))


def test_decay_of_minus_infinity_or_none_is_not_positive():
  for decay in (jnp.full((1, 3, 2), -jnp.inf), jnp.zeros((1, 3, 2))):
    assert jnp.isfinite(CALLS["linear_attention"](decay)[0]).all()
