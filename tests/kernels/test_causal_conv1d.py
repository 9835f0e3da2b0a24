"""Kernels of the causal convolution, interpreted and lowered for CUDA.

Errors are those against XLA's form in float64, all gradients too;
tests/ops/test_causal_conv1d.py compares that form with a loop.
"""

import functools
from dataclasses import dataclass

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops
from lnssm_jax.ops.causal_conv1d import pallas
from lnssm_jax.ops.causal_conv1d.types import Inputs, Options
from lnssm_jax.ops.core.segments import Segments
from pallas_kernels.causal_conv1d import config
from tests.kernels.lowered import (
  DATA,
  REPLICATED,
  assert_shard_map_keeps_shapes,
  kernels_in,
  kernels_traced,
  total,
)
from tests.ops import contract, promises

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


@dataclass(frozen=True, kw_only=True)
class Case:
  """One set of arguments."""

  T: int
  D: int = 130
  W: int = 4
  S: int | None = None  # `token_shift` with so many weights
  offsets: bool = False
  dtype: jnp.dtype = F32  # of x, offsets and y
  bias: bool = True
  silu: bool = True
  state: bool = True
  segments: bool = True
  part: int | None = None  # steps


def shapes(case, B=2):
  """Those of the arguments, by name."""
  sizes = {"x": (B, case.T, case.D), "kernel": (case.S or case.W, case.D)}
  if case.bias:
    sizes["bias"] = (case.D,)
  if case.state:
    sizes["state"] = (B, case.W - 1, case.D)
  if case.offsets:
    sizes["offsets"] = (B, case.T, case.S * case.D)
  return sizes


def drawn(case, seed=0, B=2):
  rng = np.random.default_rng(seed)
  return {name: rng.normal(size=shape) for name, shape in shapes(case, B).items()}


def dtypes_of(case, names):
  return {name: case.dtype if name in ("x", "offsets") else F32 for name in names}


def call(case, arrays, form, ids=None):
  if case.segments and ids is None:
    lengths = np.diff([0, *(n for n in (1, 3, 11, 13, 16) if n < case.T), case.T])
    ids = promises.documents(arrays["x"].shape[0], lengths)
  options = {
    "initial_state": ops.ConvState(arrays["state"]) if "state" in arrays else None,
    "segment_ids": ids,
    "implementation": form,
  }
  if case.S is not None:
    weights = list(arrays["kernel"])
    return ops.token_shift(arrays["x"], weights, offsets=arrays.get("offsets"), **options)
  activation = "silu" if case.silu else None
  kernel, bias = arrays["kernel"], arrays.get("bias")
  return ops.causal_conv1d(arrays["x"], kernel, bias, activation=activation, **options)


def check(case, form, compare=contract.errors_against_reference):
  def named(arrays, form_):
    out, state = call(case, arrays, form_)
    return {"out": out, "state": state}

  inputs = drawn(case)
  errors = compare(named, inputs, dtypes_of(case, inputs), form)
  contract.assert_small(errors, case.dtype, case.T)


SLOW = pytest.mark.slow
slow = functools.partial(pytest.param, marks=SLOW)


@pytest.mark.parametrize(
  "case",
  [
    Case(T=19, part=8),
    Case(T=19, part=8, S=3, W=2, D=128, bias=False),
    Case(T=19, part=8, S=2, W=2, D=128, bias=False, offsets=True),
    slow(Case(T=18, part=8, S=5, W=2, D=256, bias=False, offsets=True, dtype=BF16)),
    slow(Case(T=16, part=4, S=5, W=2, D=128, bias=False, offsets=True, state=False)),
    slow(Case(T=37, part=16, S=2, W=2, D=130, bias=False, offsets=True, segments=False)),
    slow(Case(T=9, S=6, W=2, bias=False, offsets=True, state=False, segments=False, dtype=BF16)),
    slow(Case(T=1, S=2, W=2, bias=False, offsets=True)),
    slow(Case(T=19, part=8, S=4, W=2, D=128, bias=False, state=False, segments=False, dtype=BF16)),
    Case(T=9, D=300, W=2, part=8),  # three blocks of channels
    slow(Case(T=5, S=1, W=2, bias=False)),
    slow(Case(T=5, S=6, W=2, bias=False)),
    Case(T=8, W=3, dtype=BF16, bias=False, silu=False, state=False, segments=False, D=128),
    slow(Case(T=40, W=2, part=16, D=256)),
    slow(Case(T=40, W=1, part=16)),
    slow(Case(T=40, W=4, dtype=BF16, part=8, D=512)),
    slow(Case(T=1)),
    slow(Case(T=2, dtype=BF16)),
    slow(Case(T=3, W=3, state=False)),
    slow(Case(T=64, part=32, segments=False, bias=False)),
    slow(Case(T=65, part=32, silu=False)),
    slow(Case(T=300)),
  ],
  ids=str,
)
def test_causal_conv1d_kernels_match_reference(case, monkeypatch):
  if case.part:
    monkeypatch.setattr(config, "split_length", lambda *sizes: case.part)
  check(case, "pallas_interpret")


def test_causal_conv1d_kernels_with_nan_keep_documents_apart():
  """A NaN in one document reaches no value and no gradient of another."""
  case = Case(T=11, D=128, W=3, state=False, bias=False, silu=False)
  ids = promises.documents(1, (6, 5))

  def run(x, kernel):
    return call(case, {"x": x, "kernel": kernel}, "pallas_interpret", ids)[0]

  @jax.jit
  def both(x, kernel, weight):
    y, pull = jax.vjp(run, x, kernel)
    return y, pull(weight)[0]

  arrays = {n: jnp.asarray(x, F32) for n, x in drawn(case, B=1).items()}
  weight = jnp.ones_like(arrays["x"])
  want = both(arrays["x"], arrays["kernel"], weight)
  for begin, end, inside in [(0, 6, 5), (6, 11, 6)]:
    spoiled = [y.at[:, inside].set(jnp.nan) for y in (arrays["x"], weight)]
    got = both(spoiled[0], arrays["kernel"], spoiled[1])
    for y, z in zip(got, want, strict=True):
      assert not np.isfinite(y[:, begin:end]).all()
      outside = np.r_[0:begin, end:11]
      np.testing.assert_array_equal(y[:, outside], z[:, outside])


def test_token_shift_kernels_with_nan_offset_keep_documents_apart():
  """A NaN in offset and cotangent of a document's first token reaches no other document."""
  case = Case(T=11, D=128, S=2, W=2, bias=False, state=False, offsets=True)
  arrays = {n: jnp.asarray(x, F32) for n, x in drawn(case, B=1).items()}
  ids = promises.documents(1, (6, 5))

  @jax.jit
  def both(x, offsets, weight):
    run = lambda x, m: call(case, arrays | {"x": x, "offsets": m}, "pallas_interpret", ids)[0]
    y, pull = jax.vjp(run, x, offsets)
    return *y, *pull((weight, weight))

  inputs = arrays["x"], arrays["offsets"], jnp.ones_like(arrays["x"])
  want = both(*inputs)
  got = both(inputs[0], *(y.at[:, 6].set(jnp.nan) for y in inputs[1:]))
  for y, z in zip(got, want, strict=True):
    assert np.isnan(y[:, 6]).all()
    np.testing.assert_array_equal(y[:, :6], z[:, :6])


@pytest.mark.slow
def test_token_shift_kernels_in_splits_have_the_same_bits(monkeypatch):
  """Values and gradients of tokens do not depend on where a sequence is cut."""
  case = Case(T=16, D=128, S=2, W=2, bias=False, offsets=True)
  arrays = {n: jnp.asarray(x, F32) for n, x in drawn(case).items()}
  results = []
  for part in (16, 8):
    monkeypatch.setattr(config, "split_length", lambda *sizes, part=part: part)
    y, pull = jax.vjp(lambda arrays: call(case, arrays, "pallas_interpret")[0], arrays)
    results.append((y, pull(y)[0] | {"kernel": 0}))  # which is summed over the splits
  chex.assert_trees_all_equal(*results)


@pytest.mark.slow
def test_causal_conv1d_kernels_in_splits_keep_packing_and_causality(monkeypatch):
  monkeypatch.setattr(config, "split_length", lambda *sizes: 8)
  case = Case(T=23, state=False)
  inputs, others = (
    {n: jnp.asarray(x, F32) for n, x in drawn(case, seed).items()} for seed in range(2)
  )

  @jax.jit
  def run(arrays, state, ids):
    arrays = arrays if state is None else arrays | {"state": state.inputs}
    plain = Case(T=23, segments=False)
    return call(plain, arrays, "pallas_interpret", ids)

  compared = lambda out, state: {"out": out, "state": state}
  promises.nothing_flows_backwards_in_time(run, inputs, others, ["x"], infinite=True)
  promises.packing_changes_nothing(run, inputs, others, ["x"], compared, infinite=True)
  promises.splitting_changes_nothing(run, inputs, ["x"], compared)


@pytest.mark.slow
def test_causal_conv1d_kernels_under_every_transformation_agree():
  case = Case(T=5, state=False, segments=False)
  inputs, others = (
    {n: jnp.asarray(x, F32) for n, x in drawn(case, seed).items()} for seed in range(2)
  )
  run = lambda arrays, implementation="pallas_interpret": call(case, arrays, implementation)
  promises.works_under_every_transformation(
    run,
    inputs,
    others,
    ["x"],
    ["pallas_interpret"],
    checkpoint=lambda f: f,  # JAX cannot run the interpreter's callbacks there
  )


def arguments(T, D, *, S=1, W=4, x=BF16, offsets=False, state=True, segments=True, lead=()):
  """`Inputs` of `pallas.run`, as shapes; `lead` are axes in front."""
  array = lambda *shape, dtype=F32: jax.ShapeDtypeStruct((*lead, *shape), dtype)
  index = array(2, T, dtype=jnp.int32)
  return Inputs(
    array(2, T, D, dtype=x),
    array(S, W, D),
    array(D) if S == 1 else None,
    array(2, T, S * D, dtype=x) if offsets else None,
    ops.ConvState(array(2, W - 1, D)) if state else None,
    Segments(index, index) if segments else None,
  )


def lowers(inputs, *, silu=True, dtype=BF16, transformed=lambda f: f):
  """How many kernels the forward pass has, and the gradient of all."""
  *floats, segments = inputs
  forward = lambda floats, segments: pallas.run(Inputs(*floats, segments), Options(silu, dtype))
  loss = lambda floats, segments: total(forward(floats, segments))
  return (
    len(kernels_traced(transformed(forward), floats, segments)),
    kernels_in(transformed(jax.grad(loss)), floats, segments),
  )


# Widths of the mixers: multiples of 128, 256 and 512.
ALL = [
  (1000, D, W, x, segments)
  for D in (640, 2304, 4096)
  for W in (2, 3, 4)
  for x in (BF16, F32)
  for segments in (False, True)
]
DEFAULT = [(1000, 2304, 4, BF16, True), (1000, 640, 3, F32, False)]


@pytest.mark.parametrize(
  "configuration",
  [x if x in DEFAULT else pytest.param(x, marks=pytest.mark.slow) for x in ALL],
  ids=str,
)
def test_causal_conv1d_kernels_lower_for_cuda(configuration):
  """One kernel each for forward and gradient: the forward pass stores no residuals."""
  T, D, W, x, segments = configuration
  inputs = arguments(T, D, W=W, x=x, state=segments, segments=segments)
  assert lowers(inputs, dtype=x) == (1, 1)


@pytest.mark.parametrize(
  ("S", "T", "x", "offsets"),
  [(4, 1000, BF16, False), (5, 2048, BF16, True), pytest.param(6, 1000, F32, True, marks=SLOW)],
  ids=str,
)
def test_token_shift_kernels_lower_for_cuda(S, T, x, offsets):
  """One kernel for all streams, and one for the gradients."""
  inputs = arguments(T, 1024, S=S, W=2, x=x, offsets=offsets)
  assert lowers(inputs, silu=False, dtype=x) == (1, 1)


@pytest.mark.parametrize(
  "transformed",
  [jax.vmap, pytest.param(jax.checkpoint, marks=pytest.mark.slow)],
  ids=["vmap", "checkpoint"],
)
def test_causal_conv1d_kernels_in_64_bit_programs_lower_for_cuda(transformed):
  lead = (3,) if transformed is jax.vmap else ()
  with jax.enable_x64(True):
    inputs = arguments(100, 128, lead=lead)
    assert lowers(inputs, transformed=transformed) == (1, 1)


def test_causal_conv1d_kernels_under_shard_map_keep_shapes():
  """The gradient of replicated parameters is summed over the devices."""
  inputs = arguments(100, 128, segments=False)[:3]
  inputs = (inputs[0], jax.ShapeDtypeStruct((4, 128), F32), inputs[2])
  form = lambda *args: ops.causal_conv1d(*args, implementation="pallas_interpret")[0]
  gradient = jax.grad(lambda inputs: total(form(*inputs)))
  assert_shard_map_keeps_shapes(gradient, inputs, (DATA, REPLICATED, REPLICATED))


def test_token_shift_kernels_under_shard_map_keep_shapes():
  x, _, _, offsets, *_ = arguments(100, 128, S=2, W=2, offsets=True, segments=False)
  inputs = x, (jax.ShapeDtypeStruct((128,), F32),) * 2, offsets
  form = lambda x, weights, offsets: ops.token_shift(
    x, weights, offsets=offsets, implementation="pallas_interpret"
  )[0]
  gradient = jax.grad(lambda inputs: total(form(*inputs)))
  assert_shard_map_keeps_shapes(gradient, inputs, (DATA, (REPLICATED,) * 2, DATA))
