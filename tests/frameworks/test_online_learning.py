"""Objectives of online learning: their minimizers, and the steps of our ops, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax.frameworks import mix_with, online_learning
from lnssm_jax.frameworks.online_learning import OBJECTIVES, STEPS, Example
from lnssm_jax.mixers import MIXERS
from tests.frameworks.test_layers import build
from tests.mixers import plain_ops, tiny
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


@pytest.mark.parametrize("name", [name for name, cls in MIXERS.items() if cls in STEPS])
def test_mixer_is_the_learner_of_its_objective(name):
  """The layer with the learner's states in place of its own."""
  x = np.random.default_rng(1).normal(size=(T, tiny.DIM))
  with jax.enable_x64():
    mixer, params = build(name)

    def learned(x):
      objective, examples = online_learning.examples(mixer, x)
      states, _ = jax.vmap(lambda one: online_learning.learn(objective, one))(examples)

      def outputs(r):
        read = jnp.einsum("htvk,thk->thv", states, r.s) / r.eta[..., None]
        return read + r.direct * r.u

      return mix_with(mixer, x, outputs)

    got = jax.jit(learned)(x)
  want = tiny.TINY[name].reference(params, x, **tiny.TINY[name].reference_options)
  assert relative_error(got, want) < 1e-13


def test_mixer_that_minimizes_no_objective_raises():
  with pytest.raises(ValueError, match=r"mixer is a DeltaNet, whose step .*: LinearAttention,"):
    online_learning.examples(tiny.starting("delta_net"), jnp.ones((T, tiny.DIM)))


@pytest.mark.parametrize("name", ["linear_attention", "longhorn"])
def test_regret_is_the_errors_less_those_of_least_squares(name):
  examples, _ = drawn(name)
  with jax.enable_x64():
    errors = np.asarray(online_learning.learn(name, examples)[1])
    got = online_learning.regret(name, examples)
  for t in range(1, T + 1):
    keys, values = examples.key[:t], examples.value[:t]
    best = np.linalg.lstsq(keys, values)[0]
    want = np.sum(errors[:t]) - np.sum((keys @ best - values) ** 2)
    np.testing.assert_allclose(got[t - 1], want, rtol=1e-10)


def test_regret_of_exact_longhorn_stays_and_that_of_the_diagonal_one_grows():
  """On a stream with a constant answer; each switch of the answer costs about as much again."""
  draw = lambda kind: online_learning.stream(
    kind, steps=400, key_dim=M, value_dim=D, period=200
  )._replace(weight=jnp.full((400, D), 8.0))
  with jax.enable_x64():
    names = ("longhorn", "longhorn_diagonal")
    exact, diagonal = (np.asarray(online_learning.regret(n, draw("fixed"))) for n in names)
    errors = np.asarray(online_learning.learn("longhorn", draw("switching"))[1])
  assert exact[-1] - exact[100] < 1e-6 * exact[100]
  assert diagonal[-1] > 2 * diagonal[100] > 10 * exact[100]
  assert errors[150:200].max() < 1e-6 < errors[200] and errors[350:].max() < 1e-6


@pytest.mark.parametrize("kind", ["fixed", "switching", "drifting", "recall"])
def test_streams_have_the_answers_that_they_promise(kind):
  steps, period = 64, 16
  with jax.enable_x64():
    draw = lambda noise: online_learning.stream(
      kind, steps=steps, key_dim=3, value_dim=2, period=period, noise=noise
    )
    keys, values, weight = (z if z is None else np.asarray(z) for z in draw(0.0))
    noisy = np.asarray(draw(0.1).value)
  assert weight is None and keys.shape == (steps, 3) and values.shape == (steps, 2)
  np.testing.assert_allclose(np.linalg.norm(keys, axis=1), 1)
  assert np.std(noisy - values) == pytest.approx(0.1, rel=0.2)

  def left(part):
    """The share of the values that the best constant map does not explain."""
    best = np.linalg.lstsq(keys[part], values[part])[0]
    return np.linalg.norm(keys[part] @ best - values[part]) / np.linalg.norm(values[part])

  whole, first = left(slice(None)), left(slice(period))
  if kind == "fixed":
    assert whole < 1e-13
  if kind == "switching":
    assert first < 1e-13 and whole > 0.1
  if kind == "drifting":
    assert 0.1 < first < whole and 0.3 < np.mean(values[-period:] ** 2) < 3
  if kind == "recall":
    pairs = np.unique(np.concatenate([keys, values], axis=1).round(9), axis=0)
    assert len(pairs) == len(np.unique(keys.round(9), axis=0)) <= period and whole > 0.1


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
  draw = lambda kind="fixed", **options: online_learning.stream(
    kind, **{"steps": 4, "key_dim": 2, "value_dim": 2} | options
  )
  with pytest.raises(ValueError, match="did you mean 'fixed'"):
    draw("fixd")
  with pytest.raises(ValueError, match="steps=0"):
    draw(steps=0)
  with pytest.raises(ValueError, match="noise=-1"):
    draw(noise=-1)
