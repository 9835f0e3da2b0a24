"""The kernels of the delta rule on a Hopper GPU: `make test-gpu`.

Everything is compared with the reference in float64, all gradients too.
"""

import dataclasses

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
from tests.ops.cases.delta_rule import DELTA_RULE, Case

pytestmark = pytest.mark.gpu

SMALL = [
  Case(T=2, K=20, V=24),
  Case(T=65, K=64, V=128, decay="weak", segments=True),
  Case(T=300, K=64, V=64, decay="weak", segments=True),
  Case(T=1000, K=128, V=64, decay="extreme", segments=True),
  Case(T=130, K=40, V=128, state=False),
  Case(T=130, K=64, V=200),
  Case(T=1000, K=72, V=80, decay="extreme", erase=True, segments=True),
  Case(T=4100, K=128, V=128, decay="ordinary", H=3),
  # Splits, of more columns of values than of keys.
  Case(T=4100, K=64, V=128, decay="weak"),
  # Wide heads: a state in two reads, values of two heads, one stage for three keys, splits.
  Case(T=130, K=160, V=200, decay="weak", segments=True),
  Case(T=300, K=256, V=256, decay="ordinary"),
  Case(T=1000, K=256, V=64, decay="extreme", erase=True, segments=True),
  Case(T=4100, K=256, V=64, decay="ordinary", H=1),
  Case(T=300, K=256, V=64, decay="uneven", channels=True, segments=True),
  # A decay per key channel.
  Case(T=65, K=64, V=128, decay="weak", channels=True, segments=True),
  Case(T=300, K=128, V=64, decay="uneven", channels=True),
  Case(T=1000, K=72, V=80, decay="extreme", channels=True, erase=True, segments=True),
  Case(T=4100, K=128, V=128, decay="ordinary", channels=True, H=3),
  Case(T=130, K=40, V=128, decay="lasting", channels=True, state=False),
  Case(T=300, K=64, V=64, decay="ordinary", channels=True, erase=True, keys="early"),
  # A write key: RWKV-7's widths, and values of two CTAs and of two heads.
  Case(
    T=300, K=64, V=64, decay="ordinary", channels=True, erase=True, segments=True, keys="before"
  ),
  Case(T=1000, K=40, V=80, decay="extreme", channels=True, erase=True, keys="before"),
  Case(T=130, K=64, V=200, decay="weak", segments=True, keys="write"),
  Case(T=4100, K=64, V=64, decay="lasting", channels=True, erase=True, keys="before", H=3),
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_values_and_gradients(case):
  assert_values_and_gradients(DELTA_RULE, dataclasses.replace(case, chunk=None), jnp.bfloat16)


HEADS = {"kv": 1}  # the axis of heads, where it is not 2


def of_heads(arrays, heads):
  """These heads alone: no head depends on another."""
  return {name: jnp.take(x, heads, axis=HEADS.get(name, 2)) for name, x in arrays.items()}


def drawn(B, T, H, K, V, erase, channels=False, write=False, seed=0):
  """Inputs by name, made on the device."""
  keys = iter(jax.random.split(jax.random.key(seed), 9))
  normal = lambda *shape: jax.random.normal(next(keys), shape)
  unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
  bf16 = jnp.bfloat16
  k = unit(normal(B, T, H, K))
  inputs = {
    "q": normal(B, T, H, K).astype(bf16),
    "k": k.astype(bf16),
    "v": normal(B, T, H, V).astype(bf16),
    "beta": jax.nn.sigmoid(normal(B, T, H)),
    "log_decay": -jnp.exp(normal(B, T, H, *([K] if channels else [])) - 3),
    "kv": normal(B, H, K, V),
  }
  if erase:
    inputs["erase_key"] = unit(k + 0.2 * normal(B, T, H, K)).astype(bf16)
  if write:
    inputs["write_key"] = normal(B, T, H, K).astype(bf16)
  return inputs


def recall(inputs, implementation):
  out, last = ops.delta_rule(
    *(inputs[n] for n in ("q", "k", "v", "beta")),
    log_decay=inputs["log_decay"],
    erase_key=inputs.get("erase_key"),
    write_key=inputs.get("write_key"),
    erase_before_decay="write_key" in inputs,
    scale=0.7,
    initial_state=ops.DeltaRuleState(inputs["kv"]),
    implementation=implementation,
  )
  return {"out": out, "kv": last.kv}


# B, T, H, K, V, erase, channels, write
MODELS = [
  (1, 8192, 32, 128, 128, False, False),
  (8, 2048, 16, 128, 128, True, False),
  (8, 2048, 32, 64, 64, False, False),
  (8, 2048, 16, 128, 128, False, True),
  (8, 2048, 32, 64, 64, True, True, True),
  (4, 256, 12, 256, 512, False),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: "-".join(map(str, model)))
def test_models(model):
  """Two heads against the reference; every bit of all, again and again."""
  H = model[2]
  heads = lambda arrays: of_heads(arrays, np.asarray([H // 2, H - 1]))

  def problem(seed):
    inputs = drawn(*model, seed=seed)
    return inputs, random_weights(recall, inputs)

  assert_part_matches_reference(recall, problem, heads, jnp.bfloat16)


def test_several_problems_at_once():
  def problem(seed):
    inputs = drawn(2, 200, 3, 64, 64, True, seed=seed)
    return inputs, random_weights(recall, inputs)

  assert_vmap_matches_separate_calls(recall, problem, "q")
