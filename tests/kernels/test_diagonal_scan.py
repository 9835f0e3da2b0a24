"""Kernels of the diagonal scan: splits, transformations, lowering for CUDA, support.

(Values and gradients: `KERNELS` in lnssm_jax/ops/diagonal_scan/cases.py.)
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from lnssm_jax import ops
from lnssm_jax.ops.core.segments import Segments
from lnssm_jax.ops.diagonal_scan import pallas
from lnssm_jax.ops.diagonal_scan.types import Inputs, Options
from pallas_kernels.core import channel_grid as channels
from pallas_kernels.diagonal_scan import config, op
from tests.kernels.interpreted import (
  BY_NAME,
  assert_promises,
  assert_transformations,
  documents_begin_at,
)
from tests.kernels.lowered import assert_shard_map_keeps_shapes, kernels_in, kernels_traced, total
from tests.ops import contract
from tests.ops.cases.diagonal_scan import DIAGONAL_SCAN, Case

BF16, F32, C64 = (jnp.dtype(x) for x in (jnp.bfloat16, jnp.float32, jnp.complex64))
SMALL = Case(T=33, chunk=None, state=False)


@pytest.mark.parametrize(
  ("case", "dtype"),
  [
    (Case(T=70, strength="weak", segments=True), BF16),
    (Case(T=70, D=130, complex_="ax", constant=True, reverse=True, segments=True), F32),
  ],
  ids=str,
)
def test_diagonal_scan_in_three_splits_matches_reference(case, dtype, monkeypatch):
  """Documents that begin where a split does, and inside of splits that a state enters. In short
  chunks, which are compiled in less time."""
  monkeypatch.setattr(channels, "num_splits", lambda *sizes: 3)
  monkeypatch.setattr(config, "_CHUNKS", (8,))
  documents_begin_at(monkeypatch, (32,), (45, 64))
  contract.assert_case(DIAGONAL_SCAN, case, dtype, "pallas_interpret")


@pytest.mark.parametrize("reverse", [False, True])
def test_diagonal_scan_nan_passes_no_split_in_which_a_document_begins(reverse):
  """The second of three splits has a document's first token; a factor of 0 would not do."""
  first, zero = jnp.arange(6)[None] == 2, (jnp.zeros((1, 3, 1)),)
  (x,) = op._entering(zero, zero, (jnp.full((1, 1), jnp.nan),), first, reverse)
  want = [False, False, True]
  assert jnp.isfinite(x[0, :, 0]).tolist() == (want[::-1] if reverse else want)


@pytest.mark.slow
@pytest.mark.parametrize(
  "case",
  [
    Case(T=40, segments=True),
    Case(T=100, complex_="ax", constant=True, reverse=True, segments=True),
    Case(T=100, constant=True, strength="weak"),
    Case(T=128, complex_="a", reverse=True, D=130),
  ],
  ids=str,
)
def test_diagonal_scan_in_splits_matches_reference(case, monkeypatch):
  """As long sequences with few channels are split: here two splits, mostly with padding."""
  monkeypatch.setattr(channels, "num_splits", lambda *sizes: 2)
  contract.assert_case(DIAGONAL_SCAN, case, F32, "pallas_interpret")


@pytest.mark.slow
@pytest.mark.parametrize(
  "case",
  [SMALL, dataclasses.replace(SMALL, constant=True, complex_="x")],
  ids=str,
)
@pytest.mark.parametrize("splits", [1, 2])
def test_diagonal_scan_kernels_in_splits_keep_packing_and_causality(case, splits, monkeypatch):
  """An infinite number in one document reaches no other, across splits neither."""
  monkeypatch.setattr(channels, "num_splits", lambda *sizes: splits)
  sizes = {"lengths": (1, 49, 1, 49), "pieces": (66, 34), "cuts": (1, 32, 65)}
  assert_promises(DIAGONAL_SCAN, case, F32, **sizes, infinite=True)


@pytest.mark.slow
@pytest.mark.parametrize("constant", [False, True], ids=["steps", "constant"])
def test_diagonal_scan_kernels_under_every_transformation_agree(constant):
  assert_transformations(DIAGONAL_SCAN, dataclasses.replace(SMALL, T=5, constant=constant), F32)


def arguments(T, decay, x, *, constant=False, segments=False, lead=()):
  """`Inputs` of `pallas.run`, as shapes; `lead` are axes in front of all."""
  B, D = 2, 256
  array = lambda *shape, dtype: jax.ShapeDtypeStruct((*lead, *shape), dtype)
  sums = jnp.result_type(F32, decay, x)
  shape = (1, 1, D) if constant else (B, T, D)
  index = array(B, T, dtype=jnp.int32)
  return Inputs(
    array(*shape, dtype=decay),
    array(B, T, D, dtype=x),
    ops.DiagonalState(array(B, D, dtype=sums)),
    Segments(index, index) if segments else None,
  )


def lowers(inputs, *, transformed=lambda f: f, **options):
  """How many kernels the forward pass has, and the gradient of all."""
  sums = inputs.state.h.dtype
  out_dtype = sums if jnp.issubdtype(sums, jnp.complexfloating) else inputs.x.dtype

  def forward(floats, segments):
    return pallas.run(Inputs(*floats, segments), Options(True, out_dtype), **options)

  loss = lambda x, segments: total(jax.tree.map(jnp.abs, forward(x, segments)))
  *floats, segments = inputs
  return (
    len(kernels_traced(transformed(forward), floats, segments)),
    kernels_in(transformed(jax.grad(loss)), floats, segments),
  )


DTYPES = [(F32, F32), (BF16, BF16), (F32, BF16), (C64, C64), (C64, BF16), (F32, C64)]
ALL = [
  (*dtypes, constant, segments, splits)
  for dtypes in DTYPES
  for constant in (False, True)
  for segments in (False, True)
  for splits in (1, 4)
]


@pytest.mark.parametrize(
  ("configuration"),
  [
    configuration if n in (2, 29) else pytest.param(configuration, marks=pytest.mark.slow)
    for n, configuration in enumerate(ALL)
  ],
  ids=str,
)
def test_diagonal_scan_kernels_lower_for_cuda(configuration):
  """One kernel each for forward and gradient; two each with splits."""
  decay, x, constant, segments, splits = configuration
  inputs = arguments(1000, decay, x, constant=constant, segments=segments)
  passes = 1 if splits == 1 else 2
  assert lowers(inputs, num_splits=splits) == (passes, 2 * passes)


@pytest.mark.parametrize(
  "wide", [pytest.param(False, marks=pytest.mark.slow), True], ids=["32 bits", "64 bits"]
)
def test_diagonal_scan_kernels_under_vmap_lower_for_cuda(wide):
  with jax.enable_x64(wide):
    inputs = arguments(100, F32, BF16, segments=True, lead=(3,))
    assert lowers(inputs, transformed=jax.vmap) == (1, 2)


def test_diagonal_scan_kernels_under_shard_map_keep_shapes():
  run = lambda *args: pallas.run(Inputs(*args, None), Options(False, F32))
  inputs = tuple(arguments(100, F32, F32)[:3])
  assert_shard_map_keeps_shapes(jax.grad(lambda inputs: total(run(*inputs))), inputs)


XLA = ["chunked", "associative", "reference"]


@pytest.mark.parametrize(
  ("decay", "x", "T", "D", "expected"),
  [
    (F32, F32, 2, 128, ["pallas", *XLA]),
    (F32, BF16, 2048, 2048, ["pallas", *XLA]),
    (BF16, BF16, 2, 128, ["pallas", *XLA]),
    (F32, F32, 1, 128, [*XLA, "pallas"]),  # XLA fuses a single token into one loop
    (F32, F32, 2, 127, [*XLA, "pallas"]),
    (C64, C64, 2, 128, ["pallas", *XLA]),
    (F32, jnp.float16, 2, 128, XLA),
    (jnp.float16, F32, 2, 128, XLA),
  ],
  ids=str,
)
def test_diagonal_scan_on_hopper_lists_supported_implementations(decay, x, T, D, expected, hopper):
  by_name = BY_NAME if "pallas" in expected else []
  args = jnp.zeros((1, T, D), decay), jnp.zeros((1, T, D), x)
  assert ops.supported(ops.diagonal_scan, *args) == expected + by_name


def test_diagonal_scan_in_float64_excludes_kernels(hopper):
  with jax.enable_x64(True):
    x = jnp.zeros((1, 2, 128), jnp.float64)
    assert ops.supported(ops.diagonal_scan, x.astype(F32), x) == XLA
    state = ops.DiagonalState(jnp.zeros((1, 128), jnp.float64))
    assert "pallas" in ops.supported(
      ops.diagonal_scan, x.astype(F32), x.astype(F32), initial_state=state
    )


def test_diagonal_scan_kernels_with_unsupported_arguments_raise():
  x = jnp.zeros((1, 2, 128), F32)
  for args, options, message in [
    ((x, x.astype(jnp.float16)), {}, "x has dtype float16"),
    ((x.astype(jnp.float16), x), {}, "decay has dtype float16"),
    ((x, x), {"chunk_size": 16}, "chunk_size=16"),
    ((jnp.ones((1,)), jnp.zeros((65536, 1, 1))), {}, "x has 65536 sequences"),
  ]:
    with pytest.raises(NotImplementedError, match=message):
      ops.diagonal_scan(*args, **options, implementation="pallas_interpret")
  with pytest.raises(NotImplementedError, match="need an NVIDIA GPU since Ampere"):
    ops.diagonal_scan(x, x, implementation="pallas")
