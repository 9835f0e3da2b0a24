"""Kernels with heads that share keys and values, or queries and keys: lowered, without copies."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from lnssm_jax import ops
from lnssm_jax.ops.core import dispatch
from pallas_kernels.linear_attention import config
from tests.kernels.lowered import kernels_in, kernels_traced, lowered, total
from tests.ops import contract
from tests.ops.cases.linear_attention import LINEAR_ATTENTION, Case

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
  monkeypatch.setattr(dispatch.device, "unsupported", lambda *_: None)
  run, inputs = call(name, heads, T, decay)
  text = lowered(run, inputs)
  count = text.count("custom_call @mosaic_gpu")
  assert count == 1 if T == 1 else count >= 1
  for width in (K, V):  # what `jnp.repeat` would make
    assert f"{G}x{H // G}x{width}xbf16" not in text
  if T > 1:
    assert kernels_in(jax.grad(lambda x: total(run(x))), inputs) >= 4


GROUPED = Case(T=65, K=16, V=24, decay="BTH", H=3, shared=3, chunk=None)


@pytest.mark.parametrize(
  ("case", "heads_per_cta", "num_stages"),
  [
    # More heads than stages, all of a group; then half of a group, in several blocks of channels.
    (dataclasses.replace(GROUPED, segments=True), 3, 2),
    (dataclasses.replace(GROUPED, H=4, shared=4, K=72, decay="H", strength="weak"), 2, 1),
    *(
      pytest.param(dataclasses.replace(GROUPED, **options), *numbers, marks=pytest.mark.slow)
      for options, *numbers in [
        ({"H": 6}, 3, 2),
        ({"H": 4, "shared": 4, "V": 72, "T": 130, "segments": True}, 4, 2),
        ({"H": 4, "shared": 2, "V": 136, "K": 72}, 2, 1),
        ({"H": 6, "shared": 6, "decay": None}, 3, 1),
        ({"H": 8, "shared": 8, "strength": "extreme", "T": 130}, 4, 2),
        ({"H": 5, "shared": 5, "K": 128, "V": 64, "segments": True}, 5, 2),
      ]
    ),
  ],
  ids=str,
)
def test_gradients_with_several_heads_per_cta_equal_the_reference(
  monkeypatch, case, heads_per_cta, num_stages
):
  monkeypatch.setattr(config, "heads_per_cta", lambda group, ctas: heads_per_cta)
  monkeypatch.setattr(config, "head_stages", lambda *sizes: num_stages)
  contract.assert_case(LINEAR_ATTENTION, case, jnp.dtype(jnp.bfloat16), "pallas_interpret")


def gradient(heads, *, decay="BTH", B=B, T=128, widths=(K, V), normalize=False):
  """(gradient of all arguments of linear attention, their shapes)."""
  array = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
  inputs = {n: array(B, T, x, widths[n == "v"]) for n, x in zip("qkv", heads, strict=True)}
  sizes = {"B": B, "T": T, "H": max(heads), "K": widths[0]}
  inputs["log_decay"] = array(*(sizes[axis] for axis in decay), dtype=jnp.float32)
  run = lambda x: ops.linear_attention(**x, normalize=normalize, implementation="pallas")
  return jax.grad(lambda x: total(run(x))), inputs


@pytest.mark.slow
def test_gradients_of_shared_queries_and_keys_are_not_written_for_each_head(monkeypatch):
  """At the shape of a Mamba-2 layer, whose heads all share queries and keys."""
  monkeypatch.setattr(dispatch.device, "unsupported", lambda *_: None)
  text = lowered(*gradient((1, 1, 32), B=16, T=2048, widths=(128, 64)))
  assert text.count("custom_call @mosaic_gpu") == 4  # forward; adjoint states, dq, dk with dv
  assert "16x2048x1x128xbf16" in text
  assert "16x2048x32x128xbf16" not in text


@pytest.mark.parametrize(
  ("heads", "options"),
  [
    ((2, 2, 4), {"normalize": True}),
    ((2, 2, 4), {"decay": "BTHK"}),
    ((4, 2, 2), {}),
    ((4, 4, 2), {}),
    ((2, 4, 2), {}),
    ((4, 4, 4), {}),
  ],
  ids=str,
)
def test_other_gradients_have_one_head_per_cta(monkeypatch, heads, options):
  monkeypatch.setattr(dispatch.device, "unsupported", lambda *_: None)
  monkeypatch.setattr(config, "heads_per_cta", lambda *sizes: pytest.fail("grouped"))
  assert len(kernels_traced(*gradient(heads, **options))) >= 4


@pytest.mark.parametrize(
  ("group", "ctas", "heads"),
  [
    (32, 16 * 32 * 32, 32),  # two rounds of all SMs, almost full
    (32, 4 * 32 * 32, 16),  # half a round with all heads, one with half of them
    (32, 32 * 32, 4),
    (24, 10**6, 24),
    (3, 12, 1),
  ],
)
def test_heads_per_cta_keep_all_sms_busy(group, ctas, heads):
  assert config.heads_per_cta(group, ctas) == heads


def test_two_stages_where_two_ctas_still_share_an_sm():
  assert config.head_stages(128, 64, 2 * 128 + 64) == 2
  assert config.head_stages(128, 128, 2 * 128) == 1
