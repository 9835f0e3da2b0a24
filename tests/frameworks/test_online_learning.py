"""Objectives of online learning: their minimizers, and the steps of our ops, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax.frameworks import online_learning
from lnssm_jax.frameworks.online_learning import OBJECTIVES, Example
from tests.mixers import plain_ops
from tests.mixers.helpers import relative_error

T, D, M = 6, 3, 4


def drawn(name):
  """(examples of T steps, S_0 [D, m])."""
  rng = np.random.default_rng(0)
  m = 1 if name == "griffin" else M
  shape = {"retnet": (T,), "gla": (T, M), "linear_attention": None}.get(name, (T, D))
  weight = None if shape is None else rng.uniform(0.1, 0.9, shape)
  return Example(rng.normal(size=(T, m)), rng.normal(size=(T, D)), weight), rng.normal(size=(D, m))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_update_is_the_minimum_of_its_objective(name):
  """Its gradient is 0 there, and not at the state before."""
  examples, old = drawn(name)
  example = jax.tree.map(lambda x: x[0], examples)
  loss, update = OBJECTIVES[name]
  with jax.enable_x64():
    gradient = jax.grad(loss)
    assert np.abs(gradient(update(old, example), old, example)).max() < 1e-13
    assert np.abs(gradient(jnp.asarray(old), old, example)).max() > 0.1


def test_printed_sign_of_gla_has_another_minimum():
  examples, old = drawn("gla")
  e = jax.tree.map(lambda x: x[0], examples)
  printed = lambda S: jnp.sum((S - old * e.weight) ** 2) + 2 * jnp.vdot(S @ e.key, e.value)
  with jax.enable_x64():
    new = OBJECTIVES["gla"].update(old, e)
    assert np.abs(jax.grad(printed)(new)).max() > 0.1
    assert np.abs(jax.grad(printed)(old * e.weight - np.outer(e.value, e.key))).max() < 1e-13


def test_diagonal_longhorn_does_not_minimize_longhorns_objective():
  examples, old = drawn("longhorn")
  e = jax.tree.map(lambda x: x[0], examples)
  with jax.enable_x64():
    exact, diagonal = (OBJECTIVES[n].update(old, e) for n in ("longhorn", "longhorn_diagonal"))
    loss = OBJECTIVES["longhorn"].loss
    assert loss(diagonal, old, e) > loss(exact, old, e)
    assert relative_error(diagonal, exact) > 0.05


@pytest.mark.parametrize("name", ["linear_attention", "retnet", "gla", "longhorn"])
def test_updates_are_the_steps_of_the_op_of_the_mixer(name):
  """The last state [K, V] of the op is the transpose."""
  examples, old = drawn(name)
  key, value, weight = (x if x is None else x[None, :, None] for x in examples)
  with jax.enable_x64():
    states, _ = online_learning.learn(name, examples, old)
  if name == "longhorn":
    rate = examples.weight / (1 + examples.weight * (examples.key**2).sum(1, keepdims=True))
    kind = plain_ops.ops.DeltaRuleState
    # A rate for each value column: the op's step by hand, one column at a time.
    last = [
      plain_ops.delta_rule(
        key, key, value[..., i : i + 1], rate[None, :, None, i],
        initial_state=kind(old.T[None, None, :, i : i + 1]),
      )[1].kv[0, 0, :, 0]
      for i in range(D)
    ]  # fmt: skip
    want = np.stack(last)
  else:
    decay = None if weight is None else np.log(weight)
    state = plain_ops.ops.LinearAttentionState(old.T[None, None], None)
    _, state = plain_ops.linear_attention(key, key, value, log_decay=decay, initial_state=state)
    want = state.kv[0, 0].T
  assert relative_error(states[-1], want) < 1e-13


def test_exact_longhorn_learns_a_linear_map_and_the_diagonal_one_keeps_an_error():
  """A stream of unit keys and their images; errors relative to those at the start."""
  rng = np.random.default_rng(0)
  keys = rng.normal(size=(200, M))
  keys /= np.linalg.norm(keys, axis=1, keepdims=True)
  examples = Example(keys, keys @ rng.normal(size=(M, D)), np.full((200, D), 4.0))
  with jax.enable_x64():
    runs = [
      np.asarray(online_learning.learn(n, examples)[1]) for n in ("longhorn", "longhorn_diagonal")
    ]
  exact, diagonal = (errors[-50:].mean() / errors[:10].mean() for errors in runs)
  assert exact < 1e-6 and 0.1 < diagonal < 1


def test_bad_arguments_raise():
  examples, old = drawn("gla")
  with pytest.raises(ValueError, match="did you mean 'gla'"):
    online_learning.learn("gl", examples)
  with pytest.raises(ValueError, match=r"gla needs examples.weight, of shape \[6, 4\]"):
    online_learning.learn("gla", examples._replace(weight=None))
  with pytest.raises(ValueError, match=r"value has shape \(5, 3\)"):
    online_learning.learn("gla", examples._replace(value=examples.value[1:]))
  with pytest.raises(ValueError, match=r"initial has shape \(4, 3\)"):
    online_learning.learn("gla", examples, old.T)
