"""The kernels of the causal convolution on a Hopper GPU: `make test-gpu`.

Everything is compared with the reference in float64, all gradients too.
"""

import functools

import jax.numpy as jnp
import pytest

from tests.gpu.hardware import (
  assert_part_matches_reference,
  assert_vmap_matches_separate_calls,
  fill_memory_with_nan,
  waves,
)
from tests.kernels.test_causal_conv1d import BF16, F32, Case, call, check, drawn

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
  fill_memory_with_nan()
  check(case, "pallas")


def run(inputs, implementation, case):
  out, last = call(case, inputs, implementation)
  if case.S is None:
    return {"out": out, "state": last.inputs}
  first, *others = out
  return {"out": first, "state": last.inputs} | {f"out {n}": y for n, y in enumerate(others)}


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
  arrays = {n: jnp.asarray(x, F32) for n, x in drawn(case, B=B).items()}
  arrays |= {n: arrays[n].astype(case.dtype) for n in ("x", "offsets") if n in arrays}
  this = functools.partial(run, case=case)
  assert_part_matches_reference(this, arrays, waves(this, arrays), some_channels, case.dtype)


def test_causal_conv1d_under_vmap_matches_separate_calls():
  case = Case(T=200)
  inputs = [{n: jnp.asarray(x, F32) for n, x in drawn(case, seed).items()} for seed in range(2)]
  assert_vmap_matches_separate_calls(functools.partial(run, case=case), inputs)
