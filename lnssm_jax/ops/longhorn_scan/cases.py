"""longhorn_scan: its arguments and cases."""

import numpy as np

from lnssm_jax import ops
from lnssm_jax.ops.core.cases import B
from lnssm_jax.ops.core.channel_cases import Case, channel_scan


def _strengths_and_keys(rng, case: Case):
  """`beta` and `k`: decays near 1 (weak), as trained (ordinary), or down to 1e-6 (extreme).

  Extreme keys have one entry that is nearly all of them, or are zero; beta comes near 0 and 1. Or
  small keys that are the same everywhere: a decay that is rounded to float32 is then wrong a
  thousand times.
  """
  T, D, N = case.T, case.D, case.N
  k, beta = rng.normal(size=(B, T, N)), 1 / (1 + np.exp(rng.normal(size=(B, T, D))))
  if case.strength == "weak":
    return beta, k / 50
  if case.strength == "lasting":
    return np.full(beta.shape, 0.5), np.full(k.shape, 1e-3)
  if case.strength == "ordinary":
    return beta, k
  k[np.arange(B)[:, None], np.arange(T), rng.integers(N, size=(B, T))] *= 1000
  k[:, ::5] = 0
  return 1 / (1 + np.exp(rng.normal(size=(B, T, D)) * 6)), k


def _draw(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
  T, D, N = case.T, case.D, case.N
  beta, k = _strengths_and_keys(rng, case)
  inputs = {"x": rng.normal(size=(B, T, D)), "beta": beta, "k": k}
  inputs["q"] = rng.normal(size=(B, T, N))
  if case.state:
    inputs["state.h"] = rng.normal(size=(B, D, N))
  if case.skip:
    inputs["skip"] = rng.normal(size=D)
  if case.activated:
    inputs["beta_bias"] = rng.normal(size=D)
    inputs["beta"] = np.log(beta / (1 - beta)) - inputs["beta_bias"]
  return inputs


def _arguments(case: Case, inputs):
  more = {name: inputs.get(name) for name in ("skip", "beta_bias")}
  more["beta_sigmoid"] = case.activated
  return tuple(inputs[n] for n in ("x", "beta", "k", "q")), more


LONGHORN_SCAN = channel_scan(
  function=ops.longhorn_scan,
  state=ops.LonghornState,
  draw=_draw,
  arguments=_arguments,
  tokens=("x", "beta", "k", "q"),
)
