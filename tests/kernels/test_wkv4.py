"""Kernels of WKV-4: splits, transformations, decay factors, lowering for CUDA, support.

(Values and gradients: `KERNELS` in lnssm_jax/ops/wkv4/cases.py.)
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops
from lnssm_jax.ops.core.segments import Segments
from lnssm_jax.ops.wkv4 import pallas
from lnssm_jax.ops.wkv4.types import Inputs, Options
from pallas_kernels.core import channel_grid as channels
from pallas_kernels.core.wgmma import Backend
from pallas_kernels.wkv4 import backward, config, op, update
from tests.kernels.interpreted import (
  BY_NAME,
  assert_promises,
  assert_transformations,
  documents_begin_at,
)
from tests.kernels.lowered import (
  DATA,
  REPLICATED,
  assert_shard_map_keeps_shapes,
  kernels_in,
  kernels_traced,
  total,
)
from tests.ops import contract
from tests.ops.cases.wkv4 import WKV4, Case

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
SMALL = Case(T=100, chunk=None, state=False)


def test_wkv4_in_three_splits_matches_reference(monkeypatch):
  """Two blocks of channels; documents that begin where a split does, and inside of a split that a
  state enters; the last split is all padding. In short chunks, which are compiled in less time."""
  monkeypatch.setattr(channels, "num_splits", lambda *sizes: 3)
  monkeypatch.setattr(config, "CHUNK", 8)
  documents_begin_at(monkeypatch, (32,), (10,))
  case = Case(T=50, D=130, strength="extreme", keys="mixed", segments=True, chunk=None)
  contract.assert_case(WKV4, case, F32, "pallas_interpret")


@pytest.mark.slow
@pytest.mark.parametrize(
  "case",
  [
    Case(T=100, segments=True, chunk=None),
    Case(T=100, strength="extreme", keys="wide", chunk=None),
    Case(T=65, strength="weak", keys="two", state=False, chunk=None),
    Case(T=32, strength="weak", chunk=None),  # the last split is all padding
  ],
  ids=str,
)
def test_wkv4_in_splits_matches_reference(case, monkeypatch):
  """As long sequences with few channels are split: here two splits."""
  monkeypatch.setattr(channels, "num_splits", lambda *sizes: 2)
  contract.assert_case(WKV4, case, F32, "pallas_interpret")


def test_wkv4_nan_passes_no_split_in_which_a_document_begins():
  """The second of three splits begins with a document, over which a factor of 0 would not do."""
  first, nan = jnp.arange(6)[None] == 2, jnp.full((1, 1), jnp.nan)
  zero = jnp.zeros((1, 3, 1))
  left = zero, zero, zero + 1
  for x in op._entering_states(left, (nan,) * 3, jnp.ones(1), first, [2, 2, 2]):
    assert jnp.isfinite(x[0, :, 0]).tolist() == [False, False, True]
  alone = backward.BackwardResults((zero, zero), *[None] * 4, passed=(zero, zero))
  for x in op._entering_cotangents(alone, (nan, nan), first, zero[:, 1:] + 1):
    assert jnp.isfinite(x[0, :, 0]).tolist() == [True, False, False]


@pytest.mark.slow
def test_wkv4_with_infinite_keys_and_rates_matches_reference():
  """Keys of -inf, a decay of inf, and one too weak for float32 to hold exp(-rate)."""
  case = Case(T=40, chunk=None)
  inputs = WKV4.inputs(case)
  inputs["k"][:, 3:30:4] = -np.inf
  inputs["decay_rate"][:3] = np.inf, 1e-9, 100.0
  names = [name for name in inputs if name not in ("k", "decay_rate")]
  call = lambda x, form: WKV4.compared(*WKV4(case, inputs | x, implementation=form))
  dtypes = dict.fromkeys(inputs, F32)
  inputs = {n: np.asarray(x, np.float32) for n, x in inputs.items()}
  errors = contract.errors_against_reference(
    lambda x, form: call(x, form)["out"],
    {n: inputs[n] for n in names},
    {n: dtypes[n] for n in names},
    "pallas_interpret",
  )
  contract.assert_small(errors, F32, case.T)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 2])
def test_wkv4_kernels_in_splits_keep_packing_and_causality(splits, monkeypatch):
  """An infinite number in one document reaches no other, across splits neither."""
  monkeypatch.setattr(channels, "num_splits", lambda *sizes: splits)
  sizes = {"lengths": (1, 49, 1, 49), "pieces": (66, 34), "cuts": (1, 32, 65)}
  assert_promises(WKV4, SMALL, F32, **sizes, infinite=True)


@pytest.mark.slow
def test_wkv4_kernels_under_every_transformation_agree():
  assert_transformations(WKV4, Case(T=5, chunk=None, state=False), F32)


def test_wkv4_decay_factor_near_one_is_exact(monkeypatch):
  """exp(x) as 1 + rest or as rest, to two roundings, for every x that a token may have."""
  # A power of a whole number is exact on the GPU; XLA's on CPUs is wrong by up to 40 roundings.
  monkeypatch.setattr(jnp, "exp2", lambda n: jnp.ldexp(jnp.ones_like(n), n.astype(jnp.int32)))
  factor_of = jax.jit(functools.partial(update.factor_of, backend=Backend(True)))
  x = np.concatenate([-np.geomspace(1e-30, 103.0, channels.CHANNELS - 4), [0, 1e-6, -0.34, -0.35]])
  x = x.astype(np.float32)
  near, rest = jax.tree.map(np.asarray, factor_of(x))
  exact = x.astype(np.float64)
  want = np.where(near, np.expm1(exact), np.exp(exact))
  assert near[np.abs(x) < 0.34].all() and not near[x < -0.36].any()
  # Below the smallest normal number float32 has fewer digits.
  np.testing.assert_allclose(rest, want, rtol=2 * np.finfo(np.float32).eps, atol=1e-37)
  assert (np.asarray(factor_of(np.full_like(x, -np.inf))[1]) == 0).all()


def arguments(T, dtype, *, segments=False, lead=()):
  """The inputs of `pallas.run`, as shapes; `lead` are axes in front."""
  B, D = 2, 256
  array = lambda *shape, dtype=F32: jax.ShapeDtypeStruct((*lead, *shape), dtype)
  ids = array(B, T, dtype=jnp.int32)
  state = ops.WKV4State(*(array(B, D) for _ in range(3)))
  steps = array(B, T, D, dtype=dtype)
  return Inputs(steps, steps, array(D), array(D), state, Segments(ids, ids) if segments else None)


def lowers(inputs, *, transformed=lambda f: f, **options):
  """How many kernels the forward pass has, and the gradient of all."""
  *floats, segments = inputs
  forward = lambda x, segments: pallas.run(Inputs(*x, segments), Options(), **options)
  loss = lambda x, segments: total(forward(x, segments))
  return (
    len(kernels_traced(transformed(forward), floats, segments)),
    kernels_in(transformed(jax.grad(loss)), floats, segments),
  )


@pytest.mark.parametrize(
  "configuration",
  [
    (BF16, True, 1),
    *(
      pytest.param((dtype, segments, splits), marks=pytest.mark.slow)
      for dtype in (F32, BF16)
      for segments in (False, True)
      for splits in (1, 4)
      if (dtype, segments, splits) != (BF16, True, 1)
    ),
  ],
  ids=str,
)
def test_wkv4_kernels_lower_for_cuda(configuration):
  """One kernel each for forward and gradient; two each with splits."""
  dtype, segments, splits = configuration
  passes = 1 if splits == 1 else 2
  inputs = arguments(1000, dtype, segments=segments)
  assert lowers(inputs, num_splits=splits) == (passes, 2 * passes)


@pytest.mark.slow
@pytest.mark.parametrize("wide", [False, True], ids=["32 bits", "64 bits"])
def test_wkv4_kernels_under_vmap_lower_for_cuda(wide):
  with jax.enable_x64(wide):
    inputs = arguments(100, BF16, segments=True, lead=(3,))
    assert lowers(inputs, transformed=jax.vmap) == (1, 2)


def test_wkv4_kernels_under_shard_map_keep_shapes():
  k, v, rate, bonus, state, _ = arguments(100, F32)
  call = lambda *args: ops.wkv4(*args[:4], initial_state=args[4], implementation="pallas_interpret")
  gradient = jax.grad(lambda inputs: total(call(*inputs)))
  specs = (DATA, DATA, REPLICATED, REPLICATED, DATA)
  assert_shard_map_keeps_shapes(gradient, (k, v, rate, bonus, state), specs)


XLA = ["chunked", "reference", "associative"]


@pytest.mark.parametrize(
  ("dtype", "T", "D", "expected"),
  [
    (F32, 2, 128, ["pallas", *XLA]),
    (BF16, 2048, 2048, ["pallas", *XLA]),
    (F32, 1, 128, ["pallas", *XLA]),
    (F32, 1, 192, [*XLA, "pallas"]),  # padding would copy the state
    (F32, 2, 127, [*XLA, "pallas"]),
    (jnp.float16, 2, 128, XLA),
  ],
  ids=str,
)
def test_wkv4_on_hopper_lists_supported_implementations(dtype, T, D, expected, hopper):
  by_name = BY_NAME if "pallas" in expected else []
  args = jnp.zeros((1, T, D), dtype), jnp.zeros((1, T, D), dtype), jnp.ones((D,)), jnp.ones((D,))
  assert ops.supported(ops.wkv4, *args) == expected + by_name


def test_wkv4_kernels_with_unsupported_arguments_raise():
  x, w = jnp.zeros((1, 2, 128), F32), jnp.ones((128,), F32)
  for args, options, message in [
    ((x.astype(jnp.float16), x, w, w), {}, "k has dtype float16"),
    ((x, x.astype(jnp.float16), w, w), {}, "v has dtype float16"),
    ((x, x, w, w), {"chunk_size": 16}, "chunk_size=16"),
  ]:
    with pytest.raises(NotImplementedError, match=message):
      ops.wkv4(*args, **options, implementation="pallas_interpret")
  with pytest.raises(NotImplementedError, match="need an NVIDIA GPU since Ampere"):
    ops.wkv4(x, x, w, w, implementation="pallas")
  many, w1 = jnp.zeros((65536, 1, 1), F32), jnp.ones((1,), F32)
  with pytest.raises(NotImplementedError, match="k has 65536 sequences"):
    ops.wkv4(many, many, w1, w1, implementation="pallas_interpret")
  with jax.enable_x64(True):
    wide = w.astype(jnp.float64)
    with pytest.raises(NotImplementedError, match="the sums have dtype float64"):
      ops.wkv4(x, x, wide, wide, implementation="pallas_interpret")
