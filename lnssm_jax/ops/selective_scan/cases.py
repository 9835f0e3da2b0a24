"""selective_scan: its arguments and cases."""

import numpy as np

from lnssm_jax import ops
from lnssm_jax.ops.core.cases import B
from lnssm_jax.ops.core.channel_cases import Case, channel_scan


def steps_and_rates(rng, case: Case):
  """`dt` and `a` with dt a weak (near 0), ordinary (as initialized), or extreme: -40 to 0.

  Or the same small dt everywhere: a decay that is rounded to float32 is then wrong a thousand
  times.
  """
  T, D, N = case.T, case.D, case.N
  a = -np.exp(rng.normal(size=(D, N)))
  if case.strength == "lasting":
    return np.full((B, T, D), 1e-6), a
  if case.strength == "weak":
    return np.exp(rng.uniform(-9, -6, size=(B, T, D))), a
  if case.strength == "ordinary":
    return np.exp(rng.uniform(-6, 0, size=(B, T, D))), a
  dt = rng.random((B, T, D)) ** 2
  dt.flat[0], dt.flat[-1] = 1, 0
  return dt, -40 * rng.random((D, N))


def _draw(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
  T, D, N = case.T, case.D, case.N
  dt, a = steps_and_rates(rng, case)
  inputs = {"x": rng.normal(size=(B, T, D)), "dt": dt, "a": a}
  inputs |= {name: rng.normal(size=(B, T, N)) for name in ("b", "c")}
  if case.state:
    inputs["state.h"] = rng.normal(size=(B, D, N))
  if case.skip:
    inputs["skip"] = rng.normal(size=D)
  if case.activated:
    inputs["dt_bias"] = rng.normal(size=D)
    positive = np.maximum(dt, 1e-6)  # softplus is never 0
    inputs["dt"] = np.log(np.expm1(positive)) - inputs["dt_bias"]
  return inputs


def _arguments(case: Case, inputs):
  more = {name: inputs.get(name) for name in ("skip", "dt_bias")} | {"dt_softplus": case.activated}
  return tuple(inputs[n] for n in ("x", "dt", "a", "b", "c")), more


SELECTIVE_SCAN = channel_scan(
  function=ops.selective_scan,
  state=ops.SelectiveState,
  draw=_draw,
  arguments=_arguments,
  tokens=("x", "dt", "b", "c"),
)
