"""Every shipped configuration of linear attention lowers for CUDA, forward and gradient, on a CPU.

This finds layouts that do not fit and sizes that are not supported.
"""

import itertools

import jax
import jax.numpy as jnp
import pytest

from lnssm_jax import ops
from lnssm_jax.models import REMAT_POLICIES
from lnssm_jax.ops.core.segments import Segments
from lnssm_jax.ops.linear_attention import pallas
from lnssm_jax.ops.linear_attention.types import Inputs, Options
from tests.kernels.lowered import (
  assert_shard_map_keeps_shapes,
  kernels_in,
  kernels_traced,
  recomputed_for_several,
  recomputed_in_a_scan,
  total,
)

DECAYS = ("none", "H", "HK", "BTH", "BTHK")
WIDTHS = tuple(itertools.product((64, 128), repeat=2))  # K, V
OPTIONS = [
  tuple(name for name, on in zip(("normalize", "bonus", "segments"), flags, strict=True) if on)
  for flags in itertools.product((False, True), repeat=3)
]
# Each with both numbers of splits that a sequence is cut into.
ALL = [
  (decay, *widths, options, 1 if (n + m) % 2 else 8)
  for n, (decay, widths) in enumerate(itertools.product(DECAYS, WIDTHS))
  for m, options in enumerate(OPTIONS)
]
SOME = [
  ("HK", 64, 64, ("normalize", "bonus", "segments"), 8),
  ("BTH", 128, 128, ("normalize", "segments"), 8),
  ("BTHK", 128, 128, ("bonus", "segments"), 1),
]


def arguments(decay, K, V, options, T=1024, lead=()):
  """(inputs, segment index) of `pallas.run`, as shapes; `lead` are axes in front of all."""
  B, H = 2, 3
  array = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct((*lead, *shape), dtype)
  axes = {"B": B, "T": T, "H": H, "K": K}
  sizes = [axes[axis] if axis in decay and decay != "none" else 1 for axis in "BTHK"]
  inputs = {
    "q": array(B, T, H, K, dtype=jnp.bfloat16),
    "k": array(B, T, H, K, dtype=jnp.bfloat16),
    "v": array(B, T, H, V, dtype=jnp.bfloat16),
    "log_decay": array(*sizes),
    "bonus": array(H, K) if "bonus" in options else None,
    "state": ops.LinearAttentionState(array(B, H, K, V), array(B, H, K)),
  }
  return inputs, array(B, T, dtype=jnp.int32) if "segments" in options else None


def run(inputs, segments, options, num_splits, architecture=None):
  if segments is not None:
    segments = Segments(segments, segments)
  arguments = Inputs(**inputs, value_log_decay=None, segments=segments)
  how = {"num_splits": num_splits, "architecture": architecture}
  return pallas.run(arguments, Options("normalize" in options, scale=0.5), **how)


def check(decay, K, V, options, num_splits, count=kernels_in, architecture=None):
  """`count` is of the forward pass, which the gradient runs with more results."""
  inputs, segments = arguments(decay, K, V, options)
  forward = lambda x, ids: run(x, ids, options, num_splits, architecture)
  gradient = jax.grad(lambda x, ids: total(forward(x, ids)))
  first = count(forward, inputs, segments)
  assert first >= 1
  assert kernels_in(gradient, inputs, segments) >= first + 2


@pytest.mark.parametrize("configuration", SOME, ids=str)
def test_lowers(configuration):
  check(*configuration, count=lambda *args: len(kernels_traced(*args)))


@pytest.mark.slow
@pytest.mark.parametrize("configuration", ALL, ids=str)
def test_every_configuration_lowers(configuration):
  check(*configuration)


@pytest.mark.slow
@pytest.mark.parametrize("configuration", ALL[::4], ids=str)
def test_kernels_for_ampere_lower(configuration):
  check(*configuration, architecture="ampere")


@pytest.mark.parametrize(
  ("transformed", "wide"),
  [
    pytest.param(recomputed_for_several, True, id="vmap-64 bits"),
    pytest.param(recomputed_in_a_scan, False, id="scan-32 bits", marks=pytest.mark.slow),
    pytest.param(recomputed_for_several, False, id="vmap-32 bits", marks=pytest.mark.slow),
    pytest.param(recomputed_in_a_scan, True, id="scan-64 bits", marks=pytest.mark.slow),
  ],
)
def test_transformations_lower(transformed, wide):
  """Several problems at once and one after the other, with activations computed again."""
  with jax.enable_x64(wide):
    inputs, _ = arguments("HK", 64, 64, ("normalize",), T=100, lead=(3,))
    loss = lambda x: total(run(x, None, ("normalize",), None))
    assert kernels_in(transformed(loss), inputs) >= 3


def test_rematerialisation_by_dots_runs_no_kernel_twice():
  """Its policy keeps what the forward kernels left; one that keeps nothing runs them again."""
  inputs, _ = arguments("BTH", 64, 64, (), T=100)
  loss = lambda x: total(run(x, None, (), None))
  traced = lambda loss: len(kernels_traced(jax.value_and_grad(loss), inputs))
  count = lambda policy: traced(jax.checkpoint(loss, policy=policy))
  once = traced(loss)
  assert count(REMAT_POLICIES["dots"]) == once < count(REMAT_POLICIES["full"])


@pytest.mark.parametrize("mapped", [False, True], ids=["plain", "vmap"])
def test_lowers_under_shard_map(mapped):
  """Where every array's type says along which axes of the mesh it varies."""
  inputs, _ = arguments("BTH", 64, 64, (), T=100, lead=(3,) if mapped else ())
  spec = jax.sharding.PartitionSpec(*((None, "data") if mapped else ("data",)))
  gradient = jax.grad(lambda x: total(run(x, None, (), None)))
  assert_shard_map_keeps_shapes(jax.vmap(gradient) if mapped else gradient, inputs, spec)
