"""The kernels of the diagonal scan: promises beside values, which the contract holds.

(Values and gradients: `KERNELS` in tests/ops/scans/diagonal_scan.py.)
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from lnssm_jax import ops
from lnssm_jax.ops import dispatch
from lnssm_jax.ops.diagonal_scan import pallas
from pallas_kernels import channels
from tests.kernels.lowered import kernels_in, total
from tests.ops import contract, promises
from tests.ops.scans.diagonal_scan import DIAGONAL_SCAN, Case

BF16, F32, C64 = (jnp.dtype(x) for x in (jnp.bfloat16, jnp.float32, jnp.complex64))
SMALL = Case(T=33, chunk=None, state=False)


def drawn(case, seed=0):
  return jax.tree.map(
    functools.partial(jnp.asarray, dtype=jnp.float32), DIAGONAL_SCAN.inputs(case, seed)
  )


def call_of(case):
  return functools.partial(DIAGONAL_SCAN, case, implementation="pallas_interpret")


def check(case):
  """Values and all gradients, as the contract has it."""
  inputs = DIAGONAL_SCAN.inputs(case)
  call = lambda x, form: DIAGONAL_SCAN.compared(*DIAGONAL_SCAN(case, x, implementation=form))
  dtypes = dict.fromkeys(inputs, F32)
  errors = contract.errors_against_reference(call, inputs, dtypes, "pallas_interpret")
  contract.assert_small(errors, F32, case.T)


@pytest.mark.parametrize(
  "case",
  [
    Case(T=40, segments=True),
    pytest.param(
      Case(T=100, complex_="ax", constant=True, reverse=True, segments=True), marks=pytest.mark.slow
    ),
    pytest.param(Case(T=100, constant=True, strength="weak"), marks=pytest.mark.slow),
    pytest.param(Case(T=128, complex_="a", reverse=True, D=130), marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_a_sequence_in_parts(case, monkeypatch):
  """As long ones with few channels are cut: here two parts, mostly with padding in the last."""
  monkeypatch.setattr(channels, "parts", lambda *sizes: 2)
  check(case)


@pytest.mark.slow
@pytest.mark.parametrize(
  "case",
  [SMALL, dataclasses.replace(SMALL, constant=True, complex_="x")],
  ids=str,
)
@pytest.mark.parametrize("parts", [1, 2])
def test_splitting_packing_and_causality(case, parts, monkeypatch):
  """An infinite number in one document reaches no other, in parts neither."""
  monkeypatch.setattr(channels, "parts", lambda *sizes: parts)
  case = dataclasses.replace(case, T=100)
  inputs, others = drawn(case), drawn(case, seed=1)
  steps, compared = DIAGONAL_SCAN.over_time(case, inputs), DIAGONAL_SCAN.compared
  call = call_of(case)
  run = jax.jit(lambda x, state, ids: call(x, initial_state=state, segment_ids=ids))
  promises.nothing_flows_backwards_in_time(run, inputs, others, steps, infinite=True)
  promises.packing_changes_nothing(
    run, inputs, others, steps, compared, infinite=True, lengths=(1, 49, 1, 49)
  )
  promises.splitting_changes_nothing(
    run, inputs, steps, compared, lengths=(66, 34), cuts=(1, 32, 65)
  )


@pytest.mark.slow
@pytest.mark.parametrize("constant", [False, True], ids=["steps", "constant"])
def test_every_transformation(constant):
  case = dataclasses.replace(SMALL, T=5, constant=constant)
  inputs, others = drawn(case), drawn(case, seed=1)
  promises.works_under_every_transformation(
    call_of(case),
    inputs,
    others,
    DIAGONAL_SCAN.over_time(case, inputs),
    ["pallas_interpret"],
    checkpoint=lambda f: f,  # JAX cannot run the interpreter's callbacks there
  )


def arguments(T, decay, x, *, constant=False, segments=False, lead=()):
  """(decay, x, state, keep) of `pallas.run`, as shapes; `lead` are axes in front of all."""
  B, D = 2, 256
  array = lambda *shape, dtype: jax.ShapeDtypeStruct((*lead, *shape), dtype)
  sums = jnp.result_type(F32, decay, x)
  shape = (1, 1, D) if constant else (B, T, D)
  keep = array(B, T, 1, dtype=jnp.bool_) if segments else None
  state = ops.DiagonalState(array(B, D, dtype=sums))
  return array(*shape, dtype=decay), array(B, T, D, dtype=x), state, keep


def lowers(inputs, *, transformed=lambda f: f, **options):
  """How many kernels the forward pass has, and the gradient of all."""
  sums = inputs[2].h.dtype
  out_dtype = sums if jnp.issubdtype(sums, jnp.complexfloating) else inputs[1].dtype

  def forward(decay, x, state, keep):
    return pallas.run(decay, x, state, keep, reverse=True, out_dtype=out_dtype, **options)

  loss = lambda x, keep: total(jax.tree.map(jnp.abs, forward(*x, keep)))
  *floats, keep = inputs
  return (
    kernels_in(transformed(lambda x, keep: forward(*x, keep)), floats, keep),
    kernels_in(transformed(jax.grad(loss)), floats, keep),
  )


DTYPES = [(F32, F32), (BF16, BF16), (F32, BF16), (C64, C64), (C64, BF16), (F32, C64)]
ALL = [
  (*dtypes, constant, segments, parts)
  for dtypes in DTYPES
  for constant in (False, True)
  for segments in (False, True)
  for parts in (1, 4)
]


@pytest.mark.parametrize(
  ("configuration"),
  [
    configuration if n in (2, 29) else pytest.param(configuration, marks=pytest.mark.slow)
    for n, configuration in enumerate(ALL)
  ],
  ids=str,
)
def test_lowers(configuration):
  """Forward and gradient lower for CUDA: one kernel each, two each in parts."""
  decay, x, constant, segments, parts = configuration
  inputs = arguments(1000, decay, x, constant=constant, segments=segments)
  passes = 1 if parts == 1 else 2
  assert lowers(inputs, number_of_parts=parts) == (passes, 2 * passes)


@pytest.mark.parametrize(
  "wide", [pytest.param(False, marks=pytest.mark.slow), True], ids=["32 bits", "64 bits"]
)
def test_lowers_under_vmap(wide):
  with jax.enable_x64(wide):
    inputs = arguments(100, F32, BF16, segments=True, lead=(3,))
    assert lowers(inputs, transformed=jax.vmap) == (1, 2)


def test_lowers_under_shard_map():
  mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  spec = jax.sharding.PartitionSpec("data")
  inputs = arguments(100, F32, F32)[:3]
  run = lambda *args: pallas.run(*args, None, reverse=False, out_dtype=F32)
  gradient = jax.grad(lambda inputs: total(run(*inputs)))
  sharded = jax.shard_map(gradient, mesh=mesh, in_specs=(spec,), out_specs=spec)
  traced = jax.eval_shape(sharded, inputs)
  assert jax.tree.map(lambda x: x.shape, traced) == jax.tree.map(lambda x: x.shape, inputs)


XLA = ["chunked", "associative", "reference"]


@pytest.mark.parametrize(
  ("decay", "x", "T", "D", "expected"),
  [
    (F32, F32, 2, 128, ["pallas", *XLA]),
    (F32, BF16, 2048, 2048, ["pallas", *XLA]),
    (BF16, BF16, 2, 128, ["pallas", *XLA]),
    (F32, F32, 1, 128, [*XLA, "pallas"]),  # one step is one loop of XLA's
    (F32, F32, 2, 127, [*XLA, "pallas"]),
    (C64, C64, 2, 128, ["pallas", *XLA]),
    (F32, jnp.float16, 2, 128, XLA),
    (jnp.float16, F32, 2, 128, XLA),
  ],
  ids=str,
)
def test_what_hopper_runs(decay, x, T, D, expected, monkeypatch):
  monkeypatch.setattr(dispatch, "hopper_obstacle", lambda: None)
  interpreted = ["pallas_interpret"] if "pallas" in expected else []
  args = jnp.zeros((1, T, D), decay), jnp.zeros((1, T, D), x)
  assert ops.supported(ops.diagonal_scan, *args) == expected + interpreted


def test_float64_is_for_xla(monkeypatch):
  monkeypatch.setattr(dispatch, "hopper_obstacle", lambda: None)
  with jax.enable_x64(True):
    x = jnp.zeros((1, 2, 128), jnp.float64)
    assert ops.supported(ops.diagonal_scan, x.astype(F32), x) == XLA
    state = ops.DiagonalState(jnp.zeros((1, 128), jnp.float64))
    assert "pallas" in ops.supported(
      ops.diagonal_scan, x.astype(F32), x.astype(F32), initial_state=state
    )


def test_what_cannot_run_is_named():
  x = jnp.zeros((1, 2, 128), F32)
  for args, options, message in [
    ((x, x.astype(jnp.float16)), {}, "x has dtype float16"),
    ((x.astype(jnp.float16), x), {}, "decay has dtype float16"),
    ((x, x), {"chunk_size": 16}, "chunk_size=16"),
    ((jnp.ones((1,)), jnp.zeros((65536, 1, 1))), {}, "x has 65536 sequences"),
  ]:
    with pytest.raises(NotImplementedError, match=message):
      ops.diagonal_scan(*args, **options, implementation="pallas_interpret")
  with pytest.raises(NotImplementedError, match="need a Hopper GPU"):
    ops.diagonal_scan(x, x, implementation="pallas")
