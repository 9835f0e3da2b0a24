"""The kernels of the delta rule on a Hopper GPU: `make test-gpu`.

Everything is compared with the reference in float64, all gradients too.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops
from lnssm_jax.ops.delta_rule.cases import DELTA_RULE, Case
from tests.gpu.hardware import assert_bits_repeat, assert_values_and_gradients, fill_memory_with_nan
from tests.ops import contract, promises

pytestmark = pytest.mark.gpu

SMALL = [
  Case(T=2, K=20, V=24),
  Case(T=65, K=64, V=128, decay="weak", segments=True),
  Case(T=1000, K=128, V=64, decay="extreme", segments=True),
  Case(T=130, K=40, V=128, state=False),
  Case(T=130, K=64, V=200),
  Case(T=1000, K=72, V=80, decay="extreme", erase=True, segments=True),
  Case(T=4100, K=128, V=128, decay="ordinary", H=3),
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_values_and_gradients(case):
  assert_values_and_gradients(DELTA_RULE, dataclasses.replace(case, chunk=None), jnp.bfloat16)


HEADS = {"kv": 1}  # the axis of heads, where it is not 2


def of_heads(arrays, heads):
  """These heads alone: no head depends on another."""
  return {name: jnp.take(x, heads, axis=HEADS.get(name, 2)) for name, x in arrays.items()}


def drawn(B, T, H, K, V, erase, seed=0):
  """Inputs by name, made on the device."""
  keys = iter(jax.random.split(jax.random.key(seed), 8))
  normal = lambda *shape: jax.random.normal(next(keys), shape)
  unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
  bf16 = jnp.bfloat16
  k = unit(normal(B, T, H, K))
  inputs = {
    "q": normal(B, T, H, K).astype(bf16),
    "k": k.astype(bf16),
    "v": normal(B, T, H, V).astype(bf16),
    "beta": jax.nn.sigmoid(normal(B, T, H)),
    "log_decay": -jnp.exp(normal(B, T, H) - 3),
    "kv": normal(B, H, K, V),
  }
  if erase:
    inputs["erase_key"] = unit(k + 0.2 * normal(B, T, H, K)).astype(bf16)
  return inputs


def recall(inputs, implementation):
  out, last = ops.delta_rule(
    *(inputs[n] for n in ("q", "k", "v", "beta")),
    log_decay=inputs["log_decay"],
    erase_key=inputs.get("erase_key"),
    scale=0.7,
    initial_state=ops.DeltaRuleState(inputs["kv"]),
    implementation=implementation,
  )
  return {"out": out, "kv": last.kv}


@functools.partial(jax.jit, static_argnums=2)
def with_gradients(inputs, weights, implementation):
  """Results of `recall`, and the gradients of its sum weighted with `weights`."""

  def functional(inputs):
    results = recall(inputs, implementation)
    products = [jnp.sum(y.astype(weights[n].dtype) * weights[n]) for n, y in results.items()]
    return sum(products), results

  (_, results), gradients = jax.value_and_grad(functional, has_aux=True)(inputs)
  return {"values": results, "gradients": gradients}


# B, T, H, K, V, erase
MODELS = [
  (1, 8192, 32, 128, 128, False),
  (8, 2048, 16, 128, 128, True),
  (8, 2048, 32, 64, 64, False),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: "-".join(map(str, model)))
def test_models(model):
  """Two heads against the reference; every bit of all, again and again."""
  T, H = model[1], model[2]
  inputs = drawn(*model)
  shapes = jax.eval_shape(functools.partial(recall, implementation="pallas"), inputs)
  keys = jax.random.split(jax.random.key(1), len(shapes))
  weights = {
    n: jnp.round(8 * jax.random.normal(key, s.shape)).astype(jnp.float32) / 8
    for key, (n, s) in zip(keys, shapes.items(), strict=True)
  }
  fill_memory_with_nan()
  first = with_gradients(inputs, weights, "pallas")
  finite = jax.tree.map(lambda x: bool(jnp.isfinite(x).all()), first)
  assert all(jax.tree.leaves(finite)), finite
  assert_bits_repeat(lambda: with_gradients(inputs, weights, "pallas"), first)

  heads = np.asarray([H // 2, H - 1])
  with jax.enable_x64(True):
    wide = lambda arrays: jax.tree.map(lambda x: x.astype(jnp.float64), arrays)
    exact = wide(of_heads(inputs, heads))
    want = with_gradients(exact, wide(of_heads(weights, heads)), "reference")
    want = jax.tree.map(np.asarray, want)
  got = {kind: of_heads(arrays, heads) for kind, arrays in first.items()}
  errors = contract.named_errors(jax.tree.map(np.asarray, got), want)
  contract.assert_small(errors, jnp.bfloat16, T)


def test_several_problems_at_once():
  """`vmap` runs the same kernels over a larger grid."""
  inputs = [drawn(2, 200, 3, 64, 64, True, seed) for seed in (0, 1)]
  shapes = jax.eval_shape(functools.partial(recall, implementation="pallas"), inputs[0])
  weights = jax.tree.map(lambda s: jnp.ones(s.shape), shapes)
  apart = [with_gradients(x, weights, "pallas") for x in inputs]
  stack = lambda *trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)
  at_once = jax.vmap(lambda x: with_gradients(x, weights, "pallas"))(stack(*inputs))
  promises.close(at_once, stack(*apart))
