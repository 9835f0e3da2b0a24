"""Kernels with heads that share keys and values, or queries and keys: lowered, without copies."""

import jax
import jax.numpy as jnp
import pytest

from lnssm_jax import ops
from lnssm_jax.ops.core import dispatch
from tests.kernels.lowered import kernels_in, lowered, total

B, H, G, K, V = 3, 4, 2, 64, 128
QUERIES, VALUES = (H, G, G), (G, G, H)  # which of q, k, v have H heads


def call(name, heads, T, decay):
  """(function of the arguments, their shapes); decays have the heads of v."""
  array = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
  q, k, v = heads
  inputs = {"q": array(B, T, q, K), "k": array(B, T, k, K), "v": array(B, T, v, V)}
  sizes = {"B": B, "T": T, "H": v, "K": K}
  inputs["log_decay"] = array(*(sizes[axis] for axis in decay), dtype=jnp.float32)
  if name == "delta_rule":
    inputs["beta"] = array(B, T, v, dtype=jnp.float32)
  return lambda x: getattr(ops, name)(**x, implementation="pallas"), inputs


@pytest.mark.parametrize(
  ("name", "heads", "T", "decay"),
  [
    ("linear_attention", QUERIES, 128, "BTH"),
    ("linear_attention", QUERIES, 1, "BTHK"),
    ("delta_rule", QUERIES, 128, "BTH"),
    ("delta_rule", VALUES, 1, "BTH"),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in [
        ("linear_attention", QUERIES, 128, "BTHK"),
        ("linear_attention", QUERIES, 128, "HK"),
        ("linear_attention", VALUES, 128, "HK"),
        ("linear_attention", VALUES, 128, "BTHK"),
        ("linear_attention", VALUES, 1, "HK"),
        ("delta_rule", VALUES, 128, "BTH"),
        ("delta_rule", QUERIES, 1, "BTH"),
      ]
    ),
  ],
)
def test_grouped_heads_lower_without_copies(monkeypatch, name, heads, T, decay):
  monkeypatch.setattr(dispatch, "hopper_unsupported", lambda: None)
  run, inputs = call(name, heads, T, decay)
  text = lowered(run, inputs)
  count = text.count("custom_call @mosaic_gpu")
  assert count == 1 if T == 1 else count >= 1
  for width in (K, V):  # what `jnp.repeat` would make
    assert f"{G}x{H // G}x{width}xbf16" not in text
  if T > 1:
    assert kernels_in(jax.grad(lambda x: total(run(x))), inputs) >= 4
