"""The kernels of the causal convolution on a Hopper GPU: `make test-gpu`.

Everything is compared with the reference in float64, all gradients too.
"""

import functools

import jax
import pytest

from tests.gpu.hardware import (
  assert_part_matches_reference,
  assert_vmap_matches_separate_calls,
  errors_against_reference,
  waves,
)
from tests.kernels.test_causal_conv1d import BF16, Case, call, check, dtypes_of, shapes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
  "case",
  [
    Case(T=1000),
    Case(T=1000, D=1024, dtype=BF16),
    Case(T=4100, D=2304, W=3, dtype=BF16, segments=False, bias=False),
    Case(T=130, W=2, D=512, silu=False, state=False),
    Case(T=2, D=128, dtype=BF16),
    Case(T=1, W=1),
    Case(T=1000, S=4, W=2, D=1024, bias=False, dtype=BF16),
    Case(T=130, S=6, W=2, D=256, bias=False),
    Case(T=1000, S=5, W=2, D=1024, bias=False, offsets=True, dtype=BF16),
    Case(T=131, S=6, W=2, D=256, bias=False, offsets=True),
    Case(T=2, S=1, W=2, D=128, bias=False, offsets=True, state=False),
  ],
  ids=str,
)
def test_causal_conv1d_on_gpu_matches_reference(case):
  check(case, "pallas", errors_against_reference)


def run(inputs, implementation, case):
  out, last = call(case, inputs, implementation)
  if case.S is None:
    return {"out": out, "state": last.inputs}
  first, *others = out
  return {"out": first, "state": last.inputs} | {f"out {n}": y for n, y in enumerate(others)}


def problem(seed, case, B):
  sizes = shapes(case, B)
  keys = jax.random.split(jax.random.key(seed), len(sizes))
  dtypes = dtypes_of(case, sizes)
  inputs = {
    n: jax.random.normal(key, size).astype(dtypes[n])
    for key, (n, size) in zip(keys, sizes.items(), strict=True)
  }
  return inputs, waves(functools.partial(run, case=case), inputs)


def some_channels(arrays):
  """128 channels; those of each of the convolutions of `offsets`."""
  D = arrays["x"].shape[-1] if "x" in arrays else arrays["out"].shape[-1]
  columns = lambda x: x.reshape(*x.shape[:-1], -1, D)[..., -200:-72].reshape(*x.shape[:-1], -1)
  return {n: columns(x) for n, x in arrays.items()}


@pytest.mark.parametrize(
  ("case", "B"),
  [
    (Case(T=2048, D=4096, dtype=BF16, state=False, segments=False), 8),
    (Case(T=2048, D=4096, dtype=BF16), 8),
    (Case(T=32768, D=2048, dtype=BF16, bias=False), 1),
    (Case(T=2048, D=2048), 8),
    (Case(T=2048, D=1024, S=5, W=2, bias=False, offsets=True, dtype=BF16), 16),
  ],
  ids=str,
)
def test_causal_conv1d_at_model_sizes_matches_reference(case, B):
  """128 channels against the reference; every bit of all, again and again."""
  this, draw = functools.partial(run, case=case), functools.partial(problem, case=case, B=B)
  assert_part_matches_reference(this, draw, some_channels, case.dtype)


def test_causal_conv1d_under_vmap_matches_separate_calls():
  case = Case(T=200)
  draw = functools.partial(problem, case=case, B=2)
  assert_vmap_matches_separate_calls(functools.partial(run, case=case), draw, "kernel")
