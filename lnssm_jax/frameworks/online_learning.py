r"""Recurrences as online learning: each step minimizes an objective in the new state.

    S_t = argmin_S  L(S, S_{t-1}; k_t, x_t),      S: [d, m], x_t: [d], k_t: [m]

The state maps keys to values, S k = x; it is the transpose of the ops' state. `OBJECTIVES` has each
objective with its minimizer in closed form; the tests find that the gradient of the objective is 0
there, and that it is the step of the op that our mixer runs.

Two objectives of the paper's table 5 are corrected: GLA's has -2 <S k, x>, printed with +2, and the
minimizer of Longhorn's is the update that couples a row's entries ("longhorn"; theorem 3.1). The
printed update keeps its diagonal only ("longhorn_diagonal"), the step of the published layer, which
minimizes another objective.

Source: Longhorn (Liu et al. 2024), sections 2 and 3, table 5.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.mixers.common.checks import check_choice
from lnssm_jax.ops.core.checks import check_shape

_NAME = "online_learning"


class Example(NamedTuple):
  """A key, its value, and what weighs them; or those of T steps, with an axis T in front."""

  key: jax.Array  # [m]
  value: jax.Array  # [d]
  # RetNet: gamma []; GLA: alpha [m]; Griffin: a [d]; Longhorn: beta [d], positive. Else not read.
  weight: jax.Array | None = None


class Objective(NamedTuple):
  """An objective of (S, S_{t-1}, example), and its minimizer (S_{t-1}, example) -> S."""

  loss: Callable[[jax.Array, jax.Array, Example], jax.Array]
  update: Callable[[jax.Array, Example], jax.Array]


_squared = lambda x: jnp.sum(jnp.square(x))
_agreement = lambda S, e: 2 * jnp.vdot(S @ e.key, e.value)
_written = lambda e: jnp.outer(e.value, e.key)
_rate = lambda e: e.weight / (1 + e.weight * jnp.vdot(e.key, e.key))  # epsilon [d] of Longhorn


def _retnet(S, old, e):
  kept = e.weight * _squared(S - old) + (1 - e.weight) * _squared(S)
  return kept - _agreement(S, e)


def _griffin(S, old, e):
  """Of one number per channel: S and the key have m = 1, and the key is the input gate."""
  a = e.weight[:, None]
  kept = jnp.sum(a * jnp.square(S - old) + (1 - a) * jnp.square(S))
  return kept - 2 * jnp.sum(jnp.sqrt(1 - a) * S * _written(e))


def _longhorn(S, old, e):
  return _squared(S - old) + jnp.sum(e.weight * jnp.square(S @ e.key - e.value))


def _longhorn_diagonal(S, old, e):
  """The same around the old state: of (S k - x)^2 only the part of each entry by itself."""
  rate = _rate(e)[:, None]
  step = jnp.square(S - old) + 2 * rate * (old * jnp.square(e.key) - _written(e)) * S
  return jnp.sum(step)


OBJECTIVES: dict[str, Objective] = {
  "linear_attention": Objective(
    lambda S, old, e: _squared(S - old) - _agreement(S, e),
    lambda old, e: old + _written(e),
  ),
  "retnet": Objective(_retnet, lambda old, e: e.weight * old + _written(e)),
  "gla": Objective(
    lambda S, old, e: _squared(S - old * e.weight) - _agreement(S, e),
    lambda old, e: old * e.weight + _written(e),
  ),
  "griffin": Objective(
    _griffin,
    lambda old, e: e.weight[:, None] * old + jnp.sqrt(1 - e.weight)[:, None] * _written(e),
  ),
  "longhorn": Objective(
    _longhorn,
    lambda old, e: old + jnp.outer(_rate(e) * (e.value - old @ e.key), e.key),
  ),
  "longhorn_diagonal": Objective(
    _longhorn_diagonal,
    lambda old, e: (
      (1 - jnp.outer(_rate(e), jnp.square(e.key))) * old + _rate(e)[:, None] * _written(e)
    ),
  ),
}


def learn(name: str, examples: Example, initial: jax.Array | None = None):
  """Runs an objective's updates: (the states [T, d, m], the errors [T]).

  The error of step t is |S_{t-1} k_t - x_t|^2, of the state before it has seen the example; their
  running mean is the regret curve of a stream against a state that knows it.

  Args:
    name: a key of `OBJECTIVES`.
    examples: key [T, m], value [T, d], weight [T, ...] or None.
    initial: S_0 [d, m]; None means zeros.

  Raises:
    ValueError: the name is unknown, shapes do not agree, or the weight is missing.
  """
  update = OBJECTIVES[check_choice("name", name, OBJECTIVES)].update
  check_shape(_NAME, "key", examples.key, (None, None), "[T, m]")
  T, m = examples.key.shape
  check_shape(_NAME, "value", examples.value, (T, None), "[T] of key, then d")
  d = examples.value.shape[1]
  axes = {"retnet": (), "gla": (m,), "griffin": (d,), "longhorn": (d,), "longhorn_diagonal": (d,)}
  if name in axes:
    if examples.weight is None:
      raise ValueError(f"{_NAME}: {name} needs examples.weight, of shape {[T, *axes[name]]}.")
    check_shape(_NAME, "weight", examples.weight, (T, *axes[name]), f"the weight of {name}")
  start = jnp.zeros((d, m), jnp.result_type(examples.key, examples.value))
  start = start if initial is None else jnp.asarray(initial)
  check_shape(_NAME, "initial", start, (d, m), "[d, m]")

  def step(S, example):
    error = _squared(S @ example.key - example.value)
    S = update(S, example)
    return S, (S, error)

  return jax.lax.scan(step, start, jax.tree.map(jnp.asarray, examples))[1]
