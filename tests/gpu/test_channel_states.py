"""The kernels of the selective and the Longhorn scan on a Hopper GPU: `make test-gpu`.

Everything is compared with the reference in float64, all gradients too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops
from tests.gpu.hardware import (
  assert_part_matches_reference,
  assert_values_and_gradients,
  assert_vmap_matches_separate_calls,
  random_weights,
)
from tests.ops.cases import SCANS
from tests.ops.cases.channel_states import Case

pytestmark = pytest.mark.gpu

F32, BF16 = jnp.float32, jnp.bfloat16
BOTH = pytest.mark.parametrize("name", ["selective_scan", "longhorn_scan"])
SMALL = [
  (Case(1000, "lasting", D=4, N=4, chunk=None), F32),
  (Case(1000, "extreme", segments=True, D=131, N=16, chunk=None), BF16),
  (Case(1000, "extreme", segments=True, D=131, N=19, chunk=None), F32),
  (Case(1000, "weak", segments=True, D=131, N=16, chunk=None), BF16),
  (Case(500, "ordinary", skip=False, D=300, N=64, chunk=None), BF16),
  (Case(100, "weak", D=256, N=16, chunk=None), F32),
  (Case(1, "extreme", D=3, N=1, chunk=None), BF16),
  (Case(100, "weak", segments=True, D=256, N=16, chunk=None, activated=True), BF16),
  (Case(1000, "extreme", D=131, N=16, chunk=None, activated=True), BF16),
]


@pytest.mark.parametrize(("case", "dtype"), SMALL, ids=str)
@BOTH
def test_channel_states_on_gpu_match_reference(name, case, dtype):
  """Sequences of 1000 steps run in several splits."""
  assert_values_and_gradients(SCANS[name], case, dtype)


def drawn(name, B, T, D, N, rates=BF16, seed=0):
  """Inputs by name, made on the device."""
  keys = iter(jax.random.split(jax.random.key(seed), 8))
  normal = lambda *shape: jax.random.normal(next(keys), shape)
  inputs = {"x": normal(B, T, D).astype(BF16), "skip": normal(D)}
  if name == "selective_scan":
    steps = jax.random.uniform(next(keys), (B, T, D), minval=-6, maxval=0)
    inputs |= {"dt": jnp.exp(steps).astype(rates), "a": -jnp.exp(normal(D, N))}
    keyed = "b", "c", "state.h"
  else:
    inputs["beta"] = jax.nn.sigmoid(normal(B, T, D)).astype(rates)
    keyed = "k", "q", "state.h"
  inputs |= {key: normal(B, T, N).astype(BF16) for key in keyed[:2]}
  return inputs | {keyed[2]: normal(B, D, N)}


def of_channels(arrays, channels):
  """These channels alone: next to the keys' gradients, no channel depends on another."""
  axes = {"x": 2, "dt": 2, "beta": 2, "out": 2, "a": 0, "skip": 0}
  axes |= {"state.h": 1, "state": 1}
  return {n: jnp.take(x, channels, axis=axes[n]) if n in axes else x for n, x in arrays.items()}


@functools.cache
def call_of(name):
  def call(inputs, implementation):
    out, state = SCANS[name](Case(2, chunk=None), inputs, implementation=implementation)
    return {"out": out, "state": state[0]}

  return call


# Rates come in float32 from the mixers.
MODELS = [((8, 2048, 4096, 16), BF16), ((8, 2048, 4096, 16), F32), ((1, 8192, 2048, 16), BF16)]


@pytest.mark.parametrize(("sizes", "rates"), MODELS, ids=str)
@BOTH
def test_channel_states_at_model_sizes_match_reference(name, sizes, rates):
  """A few channels against the reference; every bit of all, again and again.

  Only the outputs of these channels have a weight, so that they alone make the keys' gradients.
  """
  D = sizes[2]
  call = call_of(name)
  channels = np.asarray([0, 1, 127, 128, D // 2 + 77, D - 1])

  def problem(seed):
    inputs = drawn(name, *sizes, rates, seed)
    chosen = jnp.zeros(D).at[channels].set(1.0)
    weights = random_weights(call, inputs)
    weights = {"out": weights["out"] * chosen, "state": weights["state"] * chosen[:, None]}
    return inputs, weights

  part = lambda arrays: of_channels(arrays, channels)
  assert_part_matches_reference(call, problem, part, BF16)


@BOTH
def test_channel_states_under_vmap_match_separate_calls(name):
  call = call_of(name)

  def problem(seed):
    inputs = drawn(name, 2, 200, 256, 16, seed=seed)
    return inputs, random_weights(call, inputs)

  assert_vmap_matches_separate_calls(call, problem, "c" if name == "selective_scan" else "q")


@BOTH
def test_channel_states_on_gpu_prefer_kernels(name):
  scan = SCANS[name]
  args, options = scan.bind(Case(2, chunk=None), drawn(name, 1, 2, 64, 8))
  assert ops.supported(scan.function, *args, **options)[0] == "pallas"
