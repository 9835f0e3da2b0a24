"""linear_attention, every implementation: values and gradients against float64."""

import itertools
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops
from tests.ops import contract

B, H = 2, 3


@dataclass(frozen=True)
class Case:
  """One set of arguments. `decay` and `value_decay` name their axes: "HK", "BTH", ..."""

  T: int = 37
  K: int = 5
  V: int = 7
  decay: str | None = "HK"
  strength: str = "ordinary"
  value_decay: str | None = None
  bonus: bool = False
  normalize: bool = False
  segments: bool = False
  chunk: int | None = 16

  def __str__(self):
    flags = [name for name in ("bonus", "normalize", "segments") if getattr(self, name)]
    value = f"value_{self.value_decay}" if self.value_decay else None
    sizes = f"T{self.T}K{self.K}V{self.V}C{self.chunk}"
    return "-".join(x for x in (self.decay or "none", self.strength, value, *flags, sizes) if x)


# Every kind of decay with every option at least once; the lengths lie on both sides of a chunk's
# border.
CASES = [
  Case(decay=None),
  Case(decay=None, normalize=True, segments=True, T=33),
  Case(decay="H"),
  Case(decay="H", bonus=True, normalize=True, strength="extreme"),
  Case(decay="HK", normalize=True, strength="extreme"),
  Case(decay="HK", normalize=True, strength="weak", T=64),
  Case(decay="HK", bonus=True, normalize=True, segments=True),
  Case(decay="BTH", strength="extreme", segments=True),
  Case(decay="BTH", bonus=True, strength="weak"),
  Case(decay="BTHK", strength="extreme", segments=True),
  Case(decay="BTHK", bonus=True, normalize=True, strength="weak"),
  Case(decay=None, value_decay="HV", segments=True),
  Case(decay="BTHK", value_decay="BTHV", bonus=True, strength="extreme", segments=True),
  Case(decay="BTH", value_decay="HV", strength="extreme"),
  Case(decay="HK", normalize=True, segments=True, strength="extreme", chunk=None, K=16, V=32, T=65),
]
LENGTHS = [
  Case(T=T, normalize=True, strength="extreme", decay=decay, chunk=None)
  for T, decay in [
    (1, "HK"),
    (2, "BTH"),
    (15, "BTHK"),
    (63, "HK"),
    (64, "BTH"),
    (65, "BTHK"),
    (1000, "HK"),
  ]
]
SHAPES = [(1, 3, 1, None), (63, 17, 5, 32), (130, 8, 8, None)]  # T, K, V, chunk
COMBINATIONS = [
  options
  for options in itertools.product(
    (None, "H", "HK", "BTH", "BTHK"),
    ("weak", "ordinary", "extreme"),
    (None, "HV", "BTHV"),  # value decay
    (False, True),  # bonus
    (False, True),  # normalize
    (False, True),  # segments
  )
  if not (options[2] and options[4])
]
MANY = [
  Case(*SHAPES[n % 3][:3], *options, chunk=SHAPES[n % 3][3])
  for n, options in enumerate(COMBINATIONS)
]


def log_decay(rng, axes: str, strength: str, case: Case):
  """Log decays: weak (near 0), ordinary, or extreme: from -20 a step to 0, ends included."""
  sizes = {"B": B, "T": case.T, "H": H, "K": case.K, "V": case.V}
  shape = tuple(sizes[axis] for axis in axes)
  if strength == "weak":
    return -np.exp(rng.normal(size=shape) - 7)
  if strength == "ordinary":
    return -np.exp(rng.normal(size=shape) - 1)
  decay = -20 * rng.random(shape) ** 2
  decay.flat[0], decay.flat[-1] = -20, 0
  return decay


def make_inputs(case: Case, seed: int = 0):
  rng = np.random.default_rng(seed)
  T, K, V = case.T, case.K, case.V
  # Positive features where they are normalised, as every normalised system has them.
  feature = (
    (lambda *s: np.exp(rng.normal(size=s))) if case.normalize else (lambda *s: rng.normal(size=s))
  )
  inputs = {"q": feature(B, T, H, K), "k": feature(B, T, H, K), "v": rng.normal(size=(B, T, H, V))}
  inputs["kv"] = rng.normal(size=(B, H, K, V))
  if case.normalize:
    inputs["key_sum"] = feature(B, H, K)
  if case.decay:
    inputs["log_decay"] = log_decay(rng, case.decay, case.strength, case)
  if case.value_decay:
    inputs["value_log_decay"] = log_decay(rng, case.value_decay, case.strength, case)
  if case.bonus:
    inputs["bonus"] = feature(H, K)
  return inputs


def segment_ids(case: Case):
  """Ids that change often, skip numbers (an empty document) and come back to an earlier one."""
  if not case.segments:
    return None
  rng = np.random.default_rng(1)
  return jnp.asarray(3 * (np.cumsum(rng.random((B, case.T)) < 0.15, axis=1) % 2), jnp.int32)


def call(case: Case, inputs, implementation):
  out, state = ops.linear_attention(
    inputs["q"],
    inputs["k"],
    inputs["v"],
    log_decay=inputs.get("log_decay"),
    value_log_decay=inputs.get("value_log_decay"),
    bonus=inputs.get("bonus"),
    normalize=case.normalize,
    scale=0.7,
    initial_state=ops.LinearAttentionState(inputs["kv"], inputs.get("key_sum")),
    segment_ids=segment_ids(case),
    implementation=implementation,
    chunk_size=case.chunk,
  )
  return {"out": out, "state": state}


def check(case: Case, implementation: str, dtype):
  inputs = make_inputs(case)
  dtypes = {name: dtype if name in ("q", "k", "v") else jnp.float32 for name in inputs}
  errors = contract.errors_against_reference(
    lambda x, name: call(case, x, name), inputs, dtypes, implementation
  )
  limit = contract.tolerance(dtype, case.T)
  too_large = {name: error for name, error in errors.items() if not error <= limit}
  assert not too_large, f"limit {limit:.1e}: {too_large}"


@pytest.mark.parametrize("case", CASES + LENGTHS, ids=str)
def test_chunked_float32(case):
  check(case, "chunked", jnp.float32)


@pytest.mark.parametrize("case", CASES[1:12:2], ids=str)
def test_associative_float32(case):
  check(case, "associative", jnp.float32)


@pytest.mark.parametrize("case", [CASES[4], CASES[7], CASES[9], CASES[12], CASES[14]], ids=str)
def test_chunked_bfloat16(case):
  check(case, "chunked", jnp.bfloat16)


def test_chunked_float16():
  check(CASES[4], "chunked", jnp.float16)


@pytest.mark.slow
@pytest.mark.parametrize("case", MANY, ids=str)
def test_every_combination(case):
  check(case, "chunked", jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("case", MANY[::5], ids=str)
def test_associative_in_many_combinations(case):
  check(case, "associative", jnp.float32)
