"""The kernels of linear attention on a Hopper GPU: `make test-gpu`.

Everything is compared with the reference in float64, all gradients too.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops
from lnssm_jax.ops.core.cases import log_decay
from tests.gpu.hardware import (
  assert_part_matches_reference,
  assert_values_and_gradients,
  assert_vmap_matches_separate_calls,
  random_weights,
)
from tests.ops.cases.linear_attention import LINEAR_ATTENTION, Case

pytestmark = pytest.mark.gpu

SMALL = [
  Case(T=1, K=20, V=24, decay="HK", bonus=True, normalize=True),
  Case(T=65, K=64, V=128, decay="H", segments=True),
  Case(T=1000, K=128, V=64, decay="BTH", strength="extreme", normalize=True, segments=True),
  Case(T=130, K=40, V=128, decay=None, normalize=True),
  Case(T=1000, K=72, V=80, decay="HK", strength="extreme", bonus=True, segments=True),
  Case(T=1000, K=128, V=128, decay="BTHK", strength="extreme", normalize=True, segments=True),
  Case(T=65, K=64, V=64, decay="BTHK", bonus=True, normalize=True, state=False),
  # Decays that leave something of a state, which a segment boundary must keep out.
  Case(T=300, K=64, V=64, decay="BTHK", segments=True),
  Case(T=300, K=64, V=64, decay="HK", normalize=True, segments=True),
  # Values in two parts of columns.
  Case(T=300, K=128, V=256, decay="BTHK", segments=True),
  Case(T=300, K=128, V=200, decay="HK", normalize=True),
  # Lasting states in several splits, of several groups of channels, of values, and of keys.
  Case(T=1000, K=72, V=64, decay="HK", strength="weak", normalize=True, segments=True, H=1),
  Case(T=1000, K=72, V=264, decay="BTHK", strength="weak", segments=True, H=1),
  Case(T=65, K=136, V=64, decay="H", H=2),
  # Heads of queries that share keys and values; heads of values that share queries and keys.
  Case(T=300, K=64, V=64, decay="BTHK", strength="weak", segments=True, H=2, readers=2),
  Case(T=300, K=128, V=64, decay="BTH", segments=True, H=4, shared=4),
  Case(T=65, K=64, V=64, decay="H", normalize=True, H=4, shared=2),
  # A weight of the own token: many chunks and documents; a single token.
  Case(T=1000, K=128, V=64, decay="BTH", strength="weak", segments=True, own_weight=True),
  Case(T=300, K=128, V=128, decay="BTH", normalize=True, own_weight=True),
  Case(T=1, K=64, V=64, decay="BTH", own_weight=True),
  # Four keys per token, and three in rows of four.
  Case(T=300, K=128, V=64, decay="BTH", segments=True, own_weight=True, ranks=4),
  Case(T=70, K=64, V=64, decay="BTH", strength="weak", own_weight=True, ranks=3, state=False),
  # Values of a column more than the kernels take at once.
  Case(T=300, K=128, V=257, decay="BTH", segments=True),
]


FORMS = ("pallas", "pallas_ampere")


@pytest.mark.parametrize("implementation", FORMS)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_values_and_gradients(case, implementation):
  case = dataclasses.replace(case, chunk=None)
  assert_values_and_gradients(LINEAR_ATTENTION, case, jnp.bfloat16, implementation)


# The axis of heads.
HEADS = {"q": 2, "k": 2, "v": 2, "out": 2, "bonus": 0, "kv": 1, "key_sum": 1}


def of_heads(arrays, heads, decay, rows=None):
  """These heads alone, of the first `rows` rows: none depends on another."""
  axes = HEADS | {"log_decay": (decay or "H").index("H")}
  return {name: jnp.take(x, heads, axis=axes[name])[:rows] for name, x in arrays.items()}


def drawn(B, T, H, K, V, decay, normalize, bonus, seed=0):
  """Inputs by name, made on the device; decays per token are ordinary, constant ones extreme."""
  rng = np.random.default_rng(0)
  keys = iter(jax.random.split(jax.random.key(seed), 8))
  normal = lambda *shape: jax.random.normal(next(keys), shape)
  feature = (lambda *shape: jnp.exp(normal(*shape))) if normalize else normal
  bf16 = jnp.bfloat16
  inputs = {
    "q": feature(B, T, H, K).astype(bf16),
    "k": feature(B, T, H, K).astype(bf16),
    "v": normal(B, T, H, V).astype(bf16),
    "kv": normal(B, H, K, V),
  }
  if normalize:
    inputs["key_sum"] = feature(B, H, K)
  if bonus:
    inputs["bonus"] = feature(H, K)
  sizes = {"B": B, "T": T, "H": H, "K": K}
  shape = tuple(sizes[axis] for axis in decay)
  if "T" in decay:
    inputs["log_decay"] = -jnp.exp(normal(*shape) - 2)
  else:
    inputs["log_decay"] = jnp.asarray(log_decay(rng, shape, "extreme"), jnp.float32)
  return inputs


def attend(inputs, implementation):
  state = ops.LinearAttentionState(inputs["kv"], inputs.get("key_sum"))
  out, last = ops.linear_attention(
    *(inputs[n] for n in "qkv"),
    log_decay=inputs["log_decay"],
    bonus=inputs.get("bonus"),
    normalize="key_sum" in inputs,
    scale=0.7,
    initial_state=state,
    implementation=implementation,
  )
  results = {"out": out, "kv": last.kv}
  return results | ({"key_sum": last.key_sum} if "key_sum" in inputs else {})


# B, T, H, K, V, decay, normalize, bonus: the shapes that models use, and every kind of decay.
MODELS = [
  (8, 2048, 16, 128, 128, "HK", True, False),
  (8, 2048, 32, 64, 64, "H", False, False),
  (1, 32768, 16, 128, 128, "BTH", False, False),
  (8, 2048, 16, 128, 128, "BTHK", False, True),
  (16, 2048, 4, 128, 256, "BTHK", False, False),
]

# Bytes of all states that are compared, in float64. The reference holds several times that, in a
# quarter of 80 GB.
_MOST_STATES = 2**32


@pytest.mark.parametrize("implementation", FORMS)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: "-".join(map(str, model)))
def test_models(model, implementation):
  """Heads against the reference; every bit of all, again and again."""
  B, T, H, K, V, decay, _, bonus = model
  states = 8 * T * K * V  # of one row of a head
  compared = [H // 2, H - 1] if 2 * B * states <= _MOST_STATES else [H - 1]
  summed = bonus or "B" not in decay  # gradients that are sums over rows
  rows = None if summed else _MOST_STATES // states
  heads = lambda arrays: of_heads(arrays, np.asarray(compared), decay, rows)

  def problem(seed):
    inputs = drawn(*model, seed)
    return inputs, random_weights(attend, inputs)

  assert_part_matches_reference(attend, problem, heads, jnp.bfloat16, implementation)


def test_several_problems_at_once():
  def problem(seed):
    inputs = drawn(2, 200, 3, 64, 64, "BTHK", False, True, seed)
    return inputs, random_weights(attend, inputs)

  assert_vmap_matches_separate_calls(attend, problem, "q")
