"""Kernels of the norms, interpreted and lowered for CUDA.

Errors are those against XLA's form in float64, all gradients too; tests/ops/test_normalize.py
compares that form with the definition.
"""

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops
from lnssm_jax.ops.norms import pallas
from pallas_kernels.core import device
from pallas_kernels.norms import config, kernel
from pallas_kernels.norms.config import KernelConfig
from tests.kernels.lowered import (
  DATA,
  REPLICATED,
  assert_shard_map_keeps_shapes,
  kernels_in,
  kernels_traced,
  total,
)
from tests.ops import contract

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


@dataclass(frozen=True, kw_only=True)
class Case:
  """One set of arguments."""

  shape: tuple[int, ...]
  dtype: jnp.dtype = F32  # of x, added, gate and y
  arrays: tuple[str, ...] = ("scale",)
  center: bool = False
  gate_first: bool = False
  floor: float | None = None
  factor: float = 1.0
  per_head: tuple[str, ...] = ()  # of scale and bias, those of the last two axes
  rounded: bool = False  # y has the dtype of x, else float32

  def options(self) -> dict:
    """Keywords of `ops.normalize`."""
    return {
      "center": self.center,
      "gate_first": self.gate_first,
      "floor": self.floor,
      "factor": self.factor,
      "eps": 1e-2,  # large enough that a wrong one shows
    }


def drawn(case, seed=0):
  rng = np.random.default_rng(seed)
  vector = {"scale", "bias"}
  axes = lambda name: 2 if name in case.per_head else 1
  shape = lambda name: case.shape[-axes(name) :] if name in vector else case.shape
  # Rows of several sizes: some below the floor.
  size = np.linspace(0.5, 1.5, case.shape[-2])[:, None]
  return {n: rng.normal(size=shape(n)) * (1 if n in vector else size) for n in ("x", *case.arrays)}


def dtypes_of(case, names):
  return {n: F32 if n in ("scale", "bias") else case.dtype for n in names}


def check(case, form, compare=contract.errors_against_reference):
  def call(arrays, form_):
    arrays = dict(arrays)
    dtype = case.dtype if case.rounded and form_ == form else None
    y, s = ops.normalize(
      arrays.pop("x"), **arrays, **case.options(), dtype=dtype, implementation=form_
    )
    return {"y": y} | ({"s": s} if "added" in arrays else {})

  inputs = drawn(case)
  errors = compare(call, inputs, dtypes_of(case, inputs), form)
  contract.assert_small(errors, case.dtype, case.shape[-1])


slow = functools.partial(pytest.param, marks=pytest.mark.slow)
CASES = [
  Case(shape=(2, 5, 128), arrays=("scale", "bias", "added"), dtype=BF16, center=True),
  Case(shape=(1, 2, 4, 64), arrays=("scale", "bias", "gate"), center=True),
  Case(shape=(3, 1024), arrays=("scale", "added", "gate"), gate_first=True),
  Case(shape=(4, 96), arrays=("scale",), floor=1.0),
  Case(shape=(4, 64), arrays=("gate",), factor=0.125),
  Case(shape=(2, 3, 2, 64), arrays=(), factor=0.125, dtype=BF16, rounded=True),
  # 21 rows of 3 heads: padded to whole periods of 12 rows.
  Case(shape=(1, 7, 3, 32), arrays=("scale", "bias"), center=True, per_head=("scale", "bias")),
  slow(Case(shape=(2, 5, 128), arrays=("scale", "added"))),
  slow(Case(shape=(1, 2, 4, 64), arrays=("scale", "gate"), dtype=BF16)),
  slow(Case(shape=(5, 2048), arrays=("scale", "bias", "added", "gate"), center=True)),
  slow(Case(shape=(4, 96), arrays=("scale", "bias"), floor=1.0, center=True)),
  slow(Case(shape=(2, 3, 8, 64), arrays=("scale", "bias", "gate"), per_head=("bias",))),
  slow(Case(shape=(4, 256), arrays=("gate",), gate_first=True, center=True)),
  slow(Case(shape=(4, 96), arrays=(), factor=3.0)),
  slow(Case(shape=(4, 1024), arrays=(), dtype=BF16, rounded=True)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_norm_kernels_match_reference(case):
  check(case, "pallas_interpret")


def test_norm_kernels_of_few_ctas_process_all_groups(monkeypatch):
  """Three CTAs for seven groups of rows: sums over rows continue from group to group."""
  small = KernelConfig(vector=2, warps_per_row=1, tiles=2, ctas_per_sm=1)
  monkeypatch.setattr(config, "default", lambda shape: config.Config(small, small))
  monkeypatch.setattr(config, "grid_size", lambda *sizes: 3)
  check(Case(shape=(56, 64), arrays=("scale", "bias", "added")), "pallas_interpret")


def test_norm_kernels_of_few_ctas_keep_the_scales_of_heads(monkeypatch):
  """Two CTAs instead of three, each of them with the same heads in all of its groups."""
  small = KernelConfig(vector=1, warps_per_row=1, tiles=2, ctas_per_sm=3)
  monkeypatch.setattr(config, "default", lambda shape: config.Config(small, small))
  monkeypatch.setattr(device, "HOPPER", dataclasses.replace(device.HOPPER, sm_count=1))
  assert config.grid_size(small, 64, 16) == 2
  case = Case(shape=(4, 16, 32), arrays=("scale", "bias"), per_head=("scale", "bias"))
  check(case, "pallas_interpret")


def test_norm_kernels_with_nan_keep_rows_apart():
  x = jnp.ones((2, 4, 64)).at[0, 1].set(jnp.nan)
  gate = jnp.ones_like(x).at[1, 2].set(jnp.nan)
  both = lambda x, gate: ops.normalize(x, gate=gate, implementation="pallas_interpret")[0]
  y, pull = jax.vjp(both, x, gate)
  for z in (y, *pull(jnp.ones_like(y))):
    assert np.isnan(z[0, 1]).all()
    assert np.isnan(z[1, 2]).all()
    assert np.isfinite(z[0, jnp.array([0, 2, 3])]).all()
    assert np.isfinite(z[1, jnp.array([0, 1, 3])]).all()


def arguments(R, D, names, dtype=BF16):
  array = lambda *shape, dtype=F32: jax.ShapeDtypeStruct(shape, dtype)
  rows = {"x", "added", "gate"}
  shapes = {n: array(R, D, dtype=dtype) if n in rows else array(D) for n in ("x", *names)}
  return pallas.Inputs(**{n: shapes.get(n) for n in pallas.Inputs._fields})


ALL = [
  (R, D, names, dtype)
  for R, D in ((4096, 1024), (4096, 2048), (8192, 256), (8192, 128), (8192, 64), (4096, 768))
  for names in (("scale", "added"), ("scale", "bias", "gate"), ())
  for dtype in (BF16, F32)
]
DEFAULT = [(4096, 1024, ("scale", "added"), BF16), (8192, 256, ("scale", "bias", "gate"), F32)]


@pytest.mark.parametrize(
  "configuration", [c if c in DEFAULT else pytest.param(c, marks=pytest.mark.slow) for c in ALL]
)
def test_norm_kernels_lower_for_cuda(configuration):
  """A kernel each. The gradient needs the first one for a sum alone: it keeps no other result."""
  R, D, names, dtype = configuration
  inputs = arguments(R, D, names, dtype)
  options = pallas.Options(True, 1e-5, None, 1.0, False, dtype)
  forward = lambda inputs: pallas.run(inputs, options)
  assert len(kernels_traced(forward, inputs)) == 1
  gradient = jax.grad(lambda inputs: total(forward(inputs)))
  assert kernels_in(gradient, inputs) == 1 + ("added" in names)


@pytest.mark.parametrize("uses_sum", [False, True])
def test_norm_kernels_load_no_gradient_of_an_unused_sum(uses_sum, monkeypatch):
  given = []

  def watched(inputs, inverse, d_out, d_sum, *static):
    given.append(d_sum)
    return backward_kernel(inputs, inverse, d_out, d_sum, *static)

  backward_kernel = kernel.backward_kernel
  monkeypatch.setattr(kernel, "backward_kernel", watched)
  x = jax.ShapeDtypeStruct((64, 128), BF16)
  run = lambda x: ops.normalize(x, implementation="pallas_interpret")
  jax.eval_shape(jax.grad(lambda x: total(run(x) if uses_sum else run(x)[0])), x)
  assert [d_sum is not None for d_sum in given] == [uses_sum]


@pytest.mark.parametrize(
  "names, dtype, keeps_output",
  [((), BF16, True), ((), F32, False), (("gate",), BF16, False)],
)
def test_a_norm_alone_keeps_its_output_for_the_gradient(names, dtype, keeps_output):
  """Later operations keep it anyway; its argument would be another array as large."""
  rng = np.random.default_rng(0)
  x, *gate = (jnp.asarray(rng.normal(size=(8, 64)), BF16) for _ in ("x", *names))
  run = lambda x, *gate: ops.normalize(
    x, gate=gate[0] if gate else None, dtype=dtype, implementation="pallas_interpret"
  )[0]
  y, pull = jax.vjp(run, x, *gate)
  kept = jax.tree.leaves(pull)
  same = lambda z: any(k.shape == z.shape and bool((k == z).all()) for k in kept)
  assert (same(y), same(x)) == (keeps_output, not keeps_output)


@pytest.mark.parametrize(
  "transformed",
  [jax.vmap, pytest.param(jax.checkpoint, marks=pytest.mark.slow)],
  ids=["vmap", "checkpoint"],
)
def test_norm_kernels_in_64_bit_programs_lower_for_cuda(transformed):
  lead = (3,) if transformed is jax.vmap else ()
  options = pallas.Options(False, 1e-5, None, 1.0, False, BF16)
  with jax.enable_x64(True):
    x = jax.ShapeDtypeStruct((*lead, 64, 128), BF16)
    run = lambda x: pallas.run(pallas.Inputs(x, None, None, None, None), options)
    # A sum of x itself would need no kernel.
    loss = jax.grad(lambda x: total(run(x)[0] ** 2))
    assert kernels_in(transformed(loss), x) == 2


def test_norm_kernels_under_shard_map_keep_shapes():
  """The gradient of replicated parameters is summed over the devices."""
  x, scale = jax.ShapeDtypeStruct((4, 8, 64), BF16), jax.ShapeDtypeStruct((64,), F32)
  form = lambda x, scale: ops.normalize(x, scale, added=x, implementation="pallas_interpret")
  gradient = jax.grad(lambda inputs: total(form(*inputs)))
  assert_shard_map_keeps_shapes(gradient, (x, scale), (DATA, REPLICATED))
