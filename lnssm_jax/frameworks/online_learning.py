r"""Recurrences as online learning: each step minimizes an objective in the new state.

    S_t = argmin_S  L(S, S_{t-1}; k_t, x_t),      S: [d, m], x_t: [d], k_t: [m]

The state maps keys to values, S k = x; it is the transpose of the ops' state. `OBJECTIVES` has each
objective with its minimizer in closed form; the tests find that the gradient of the objective is 0
there, and that it is the step of the mixer: `examples` reads what a mixer learns from its input.
`stream` draws examples with a known answer, and `regret` says what an objective loses on them.

Two objectives of the paper's table 5 are corrected: GLA's has -2 <S k, x>, printed with +2, and the
minimizer of Longhorn's is the update that couples a row's entries ("longhorn"; theorem 3.1). The
printed update keeps its diagonal only ("longhorn_diagonal"), the step of the published layer, which
minimizes another objective.

Source: Longhorn (Liu et al. 2024), sections 2 and 3, table 5.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax.frameworks.layers import Recurrence, recurrences
from lnssm_jax.mixers import GLA, RGLRU, LinearAttention, Longhorn, LonghornExact, RetNet
from lnssm_jax.mixers.common.checks import check_choice, check_positive
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

  The error of step t is |S_{t-1} k_t - x_t|^2, of the state before it has seen the example.

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


def regret(name: str, examples: Example) -> jax.Array:
  """The regret [T] after each step: the errors so far less those of the best constant state.

      regret_T = sum_{t <= T} |S_{t-1} k_t - x_t|^2  -  min_S sum_{t <= T} |S k_t - x_t|^2

  Raises:
    ValueError: as `learn`.
  """
  _, errors = learn(name, examples)
  sums = lambda x: jnp.cumsum(x, axis=0)
  keys = sums(jnp.einsum("tm,tn->tmn", examples.key, examples.key))
  both = sums(jnp.einsum("td,tm->tdm", examples.value, examples.key))
  # The least squares of the first t examples, S = both keys^+; many keys have no inverse at first.
  explained = jnp.einsum("tdm,tmn,tdn->t", both, jnp.linalg.pinv(keys, hermitian=True), both)
  best = sums(jnp.sum(jnp.square(examples.value), axis=1)) - explained
  return sums(errors) - jnp.maximum(best, 0)


Kind = Literal["fixed", "switching", "drifting", "recall"]


def stream(
  kind: Kind,
  *,
  steps: int,
  key_dim: int,
  value_dim: int,
  period: int = 32,
  noise: float = 0.0,
  seed: int = 0,
) -> Example:
  """Examples x_t = W_t k_t + noise with unit keys, weights None; of JAX's default float dtype.

      "fixed"      W_t is constant
      "switching"  W_t is drawn again every `period` steps
      "drifting"   W_t = a W_{t-1} + (1 - a^2)^(1/2) drawn,  a = 1 - 1 / period
      "recall"     `period` pairs of a key and a value, of which each step draws one

  Entries of W and values are normal with variance 1. More than `key_dim` pairs have no W that maps
  all of them.

  Args:
    noise: standard deviation of the noise of each entry of x.

  Raises:
    ValueError: `kind` is unknown, a size is not positive, or `noise` is negative.
  """
  check_choice("kind", kind, get_args(Kind))
  T, m = check_positive("steps", steps), check_positive("key_dim", key_dim)
  d, period = check_positive("value_dim", value_dim), check_positive("period", period)
  if not noise >= 0:
    raise ValueError(f"{_NAME}: noise={noise} must be 0 or more.")
  random = np.random.default_rng(seed)
  unit = lambda keys: keys / np.linalg.norm(keys, axis=1, keepdims=True)
  if kind == "recall":
    chosen = random.integers(period, size=T)
    keys = unit(random.normal(size=(period, m)))[chosen]
    values = random.normal(size=(period, d))[chosen]
  else:
    keys, drawn = unit(random.normal(size=(T, m))), random.normal(size=(T, d, m))
    maps = drawn[np.arange(T) // period if kind == "switching" else np.zeros(T, int)]
    if kind == "drifting":
      kept = 1 - 1 / period
      for t in range(1, T):
        maps[t] = kept * maps[t - 1] + (1 - kept**2) ** 0.5 * drawn[t]
    values = np.einsum("tdm,tm->td", maps, keys)
  values = values + noise * random.normal(size=(T, d))
  return Example(*(jnp.asarray(z, jnp.result_type(float)) for z in (keys, values)))


def examples(mixer: Any, x: jax.Array) -> tuple[str, Example]:
  """(The objective, the examples [H, T, ...] of H heads) that a layer learns from its input [T, D].

  `jax.vmap(lambda one: learn(name, one))(examples)` has the states of the layer.

  Raises:
    ValueError: the step of the layer minimizes none of the objectives (`STEPS` has those that do).
  """
  name = STEPS.get(type(mixer))
  if name is None:
    names = ", ".join(cls.__name__ for cls in STEPS)
    raise ValueError(
      f"{_NAME}: mixer is a {type(mixer).__name__}, whose step minimizes none of the objectives of "
      f"table 5; those of these do: {names}."
    )
  (r,) = recurrences(mixer, x)
  return name, jax.tree.map(lambda z: jnp.moveaxis(z, 1, 0), _READERS[name](r))


STEPS: dict[type, str] = {
  LinearAttention: "linear_attention",
  RetNet: "retnet",
  GLA: "gla",
  RGLRU: "griffin",
  Longhorn: "longhorn_diagonal",
  LonghornExact: "longhorn",
}


def _of_griffin(r: Recurrence):
  """RG-LRU writes sqrt(1 - a^2) i x, table 5 sqrt(1 - a) i x: the value is sqrt(1 + a) i x."""
  decay = r.o[:, :, 0]
  return Example(r.e, r.u / jnp.sqrt(1 - decay), decay)


def _of_longhorn(r: Recurrence):
  """beta from the rate epsilon = beta / (1 + beta |k|^2)."""
  length = jnp.sum(jnp.square(r.e), axis=-1, keepdims=True)
  return Example(r.e, r.u, r.rate / (1 - r.rate * length))


_READERS: dict[str, Callable[[Recurrence], Example]] = {
  "linear_attention": lambda r: Example(r.e, r.u),
  "retnet": lambda r: Example(r.e, r.u, r.o[:, :, 0, 0]),
  "gla": lambda r: Example(r.e, r.u, r.o[..., 0]),
  "griffin": _of_griffin,
  "longhorn": _of_longhorn,
  "longhorn_diagonal": _of_longhorn,
}
