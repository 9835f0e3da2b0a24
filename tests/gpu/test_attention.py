"""The kernels of softmax attention on a Hopper GPU: `make test-gpu`.

Everything is compared with the reference in float64, all gradients too.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops
from pallas_kernels.attention.config import WIDEST_AMPERE
from pallas_kernels.core import device
from tests.gpu.hardware import (
  assert_part_matches_reference,
  assert_values_and_gradients,
  assert_vmap_matches_separate_calls,
  random_weights,
)
from tests.ops.cases.attention import ATTENTION, Case

pytestmark = pytest.mark.gpu

SMALL = [
  Case(T=2, K=64, V=64),
  Case(T=1000, K=128, V=128, heads=(4, 2), segments=True, strength="extreme"),
  Case(T=700, K=64, V=64, heads=(6, 2), window=200, segments=True),
  Case(T=700, K=256, V=256, segments=True),
  Case(T=700, K=192, V=128, heads=(4, 4), segments=True, sinks=True),
  Case(T=300, K=128, V=128, causal=False, segments=True),
  Case(T=700, K=128, V=128, heads=(4, 2), segments=True, dropout=0.1),
  Case(T=300, K=40, V=200, block=70),
  # A cache that is full and wrapped around, or partly filled, before many tokens and before one.
  Case(T=700, K=128, V=128, heads=(4, 2), window=600, cached=(2000, 77), segments=True),
  Case(T=130, K=64, V=64, cached=(1000, 3)),
  Case(T=1, K=64, V=64, cached=(1000, 0)),
  Case(
    T=1,
    K=128,
    V=128,
    heads=(16, 2),
    window=3000,
    cached=(5000, 500),
    strength="extreme",
    sinks=True,
  ),
  Case(T=1, K=192, V=128, heads=(4, 4), window=40, cached=(100, 20)),
  Case(T=1, K=256, V=256, heads=(8, 1), window=2048, cached=(2000, 1)),
]


SINCE_AMPERE = [
  case for case in SMALL if case.T > 1 and max(case.K, case.V) <= WIDEST_AMPERE and not case.dropout
]
FORMS = ("pallas", "pallas_ampere")


@pytest.mark.parametrize(
  ("case", "form"),
  [(case, "pallas") for case in SMALL] + [(case, "pallas_ampere") for case in SINCE_AMPERE],
  ids=str,
)
def test_attention_on_gpu_matches_reference(case, form):
  if case.T > 1 and case not in SINCE_AMPERE and device.current().architecture == device.AMPERE:
    pytest.skip("--ampere: heads of more than 128 and dropout are XLA's")
  assert_values_and_gradients(ATTENTION, dataclasses.replace(case, chunk=None), jnp.bfloat16, form)


def drawn(B, T, H, K, seed):
  keys = jax.random.split(jax.random.key(seed), 3)
  arrays = (jax.random.normal(key, (B, T, H, K), jnp.bfloat16) for key in keys)
  return dict(zip("qkv", arrays, strict=True))


def attend_in_documents_of(mean):
  """Documents of about `mean` tokens, the same in all rows."""

  def attend(inputs, implementation):
    B, T = inputs["q"].shape[:2]
    starts = np.random.default_rng(0).random(T) < 1 / mean
    ids = jnp.broadcast_to(jnp.cumsum(jnp.asarray(starts, jnp.int32)), (B, T))
    arrays = (inputs[name] for name in "qkv")
    return {"out": ops.attention(*arrays, segment_ids=ids, implementation=implementation)[0]}

  return attend


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mean", [2, 500])
@pytest.mark.parametrize("sizes", [(8, 2048, 16, 128), (4, 2048, 32, 64)], ids=str)
def test_attention_at_model_sizes_matches_reference(sizes, mean, form):
  """A head against the reference; every bit of all, again and again."""
  call = attend_in_documents_of(mean)

  def problem(seed):
    inputs = drawn(*sizes, seed)
    return inputs, random_weights(call, inputs)

  head = lambda arrays: {name: x[:, :, -1:] for name, x in arrays.items()}
  assert_part_matches_reference(call, problem, head, jnp.bfloat16, form)


def test_attention_under_vmap_matches_separate_calls():
  call = attend_in_documents_of(50)

  def problem(seed):
    inputs = drawn(2, 200, 3, 64, seed)
    return inputs, random_weights(call, inputs)

  assert_vmap_matches_separate_calls(call, problem, "q")
