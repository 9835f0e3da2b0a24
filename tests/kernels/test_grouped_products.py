"""JAX's kernels for products of groups of rows, interpreted with races detected, in a mixture.

The reference is the form in blocks in float64, which `tests/models/test_experts.py` compares with a
loop over experts.
"""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from lnssm_jax.models import experts
from lnssm_jax.ops.core.recording import choices_of_xla
from pallas_kernels.core import device
from pallas_kernels.grouped_products import kernel
from tests.kernels.lowered import kernels_in, total
from tests.ops.contract import relative_error

BF16, F32 = jnp.bfloat16, jnp.float32


def problem(N, D, F, E, chosen):
  """Kernels, tokens, weights, a cotangent, and the two experts of each token, of `chosen`."""
  random = np.random.default_rng(0)
  normal = lambda *shape: np.asarray(jnp.asarray(random.normal(size=shape), BF16), np.float64)
  kernels = [normal(*shape) / 8 for shape in ((E, D, F), (E, D, F), (E, F, D))]
  indices = np.stack([random.choice(chosen, 2, replace=False) for _ in range(N)])
  return (kernels, normal(N, D), random.random((N, 2))), normal(N, D), np.int32(indices)


def gradients(inputs, cotangent, indices, dtype):
  """The mixture of experts of these kernels, with its gradients; weights are float32 or wider."""
  kernels, x, weights = inputs
  kernels, x = jax.tree.map(lambda z: jnp.asarray(z, dtype), (tuple(kernels), x))
  run = lambda *given: experts._of_these(given[0], jax.nn.silu, None, *given[1:], indices)
  y, back = jax.vjp(run, kernels, x, jnp.asarray(weights, jnp.promote_types(dtype, F32)))
  return y, back(jnp.asarray(cotangent, y.dtype))


def errors(problem):
  """Of values and gradients of bfloat16 products against float64."""
  found = jax.jit(functools.partial(gradients, dtype=BF16))(*problem)
  with jax.enable_x64(True):
    want = jax.jit(functools.partial(gradients, dtype=jnp.float64))(*problem)
  return [relative_error(*pair) for pair in zip(*map(jax.tree.leaves, (found, want)), strict=True)]


@pytest.fixture
def grouped(monkeypatch):
  """As on a Hopper GPU of two SMs."""
  monkeypatch.setattr(device, "unsupported", lambda *_: None)
  monkeypatch.setattr(kernel, "_MIN_ROWS", 1)
  monkeypatch.setattr(jax, "devices", lambda *_: [SimpleNamespace(core_count=2)])


def interpret(monkeypatch):
  """From here on; without rematerialization, under which JAX cannot run the interpreter."""
  options = {"interpret": plgpu.InterpretGPUParams(detect_races=True), "grid": (2,)}
  run = plgpu.kernel
  monkeypatch.setattr(plgpu, "kernel", lambda body, **given: run(body, **(given | options)))
  monkeypatch.setattr(jax, "checkpoint", lambda function, **_: function)


def by_xla(monkeypatch):
  """From here on: what the kernels compute."""

  def product(x, matrices, sizes):
    y = jax.lax.ragged_dot(x, matrices, sizes)
    return jnp.where(jnp.arange(len(x))[:, None] < sizes.sum(), y, jnp.nan)  # unwritten

  def gradient(x, dy, sizes):
    last, row = jnp.cumsum(sizes)[:, None], jnp.arange(len(x))
    is_of = (row < last) & (row >= last - sizes[:, None])
    return jnp.einsum("gr,rd,rf->gdf", is_of.astype(x.dtype), x, dy)

  transposed = lambda dy, matrices, sizes: product(dy, matrices.swapaxes(1, 2), sizes)
  monkeypatch.setattr(kernel, "_product", product)
  monkeypatch.setattr(kernel, "_product_transposed", transposed)
  monkeypatch.setattr(kernel, "_gradient", gradient)


SOME_NONE = (4, [0, 2, 3])  # experts, and those that tokens select
ELSEWHERE = (2, [-2, -1, 0, 1, 2, 3])
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
  ("N", "E", "chosen", "products"),
  [
    pytest.param(61, *ELSEWHERE, by_xla, id="of four devices, by XLA"),
    slow(75, *ELSEWHERE, interpret, id="of four devices"),
    slow(75, *SOME_NONE, interpret, id="none selects the second"),
  ],
)
def test_grouped_products_in_a_mixture_match_float64(grouped, monkeypatch, N, E, chosen, products):
  """Groups that begin inside of tiles, empty ones, rows of experts that are elsewhere."""
  products(monkeypatch)
  found = errors(problem(N, 64, 64, E, chosen))
  assert len(found) == 6
  assert all(error < 1e-2 for error in found), found


def test_tiles_are_those_of_the_results_sides_and_columns_in_turn(monkeypatch):
  """64 columns in tiles of 128 would be others' too."""
  tiles, kept = [], ("block_m", "block_n", "grid_block_n")
  given = lambda x, *_, **options: tiles.append(tuple(map(options.get, kept))) or x
  monkeypatch.setattr(kernel, "_library", lambda: (given, given))
  x, wide = jnp.zeros((8, 64), BF16), jnp.zeros((8, 256), BF16)
  matrices, sizes = jnp.zeros((2, 64, 256), BF16), jnp.array([4, 4])
  kernel._launch(x, matrices, sizes, transposed=False)
  kernel._launch(wide, matrices, sizes, transposed=True)
  jax.eval_shape(kernel._gradient, x, wide, sizes)
  assert tiles == [(128, 128, 2), (128, 64, 1), (64, 128, 2)]


@pytest.mark.parametrize(
  ("given", "reason"),
  [
    ((1024, 8, (64, 192), BF16), None),
    ((1023, 8, (64, 192), BF16), "1023 rows of 8 experts, and the kernels need 128 rows"),
    ((65 * 128, 65, (64, 64), BF16), "rows of 65 experts, and .* at most 64"),
    ((1024, 8, (64, 96), BF16), r"widths \(64, 96\) must be multiples of 64"),
    ((1024, 8, (64, 64), F32), "the kernels multiply bfloat16, and not"),
  ],
)
def test_what_the_kernels_do_not_multiply_is_said(given, reason):
  found = kernel.unsupported(*given)
  assert found is None if reason is None else re.search(reason, found)


def test_grouped_products_sum_gradients_of_kernels_over_rows_on_several_devices(
  grouped, monkeypatch
):
  """Of two devices for rows and two for experts, which have types of their own under shard_map."""
  by_xla(monkeypatch)
  (kernels, x, weights), _, indices = problem(64, 64, 64, 4, [0, 1, 2, 3])
  mesh = AbstractMesh((2, 2), ("data", experts.AXIS), axis_types=(AxisType.Auto,) * 2)
  of_experts, of_rows = PartitionSpec(experts.AXIS), PartitionSpec(("data", experts.AXIS))

  def gradient(kernels, x, weights, indices):
    run = lambda kernels: experts.mixture(kernels, jax.nn.silu, x, weights, indices, 4)
    return jax.grad(lambda kernels: total(run(kernels)))(kernels)

  specs = of_experts, of_rows, of_rows, of_rows
  sharded = jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=of_experts)
  kernels = tuple(jnp.asarray(kernel, BF16) for kernel in kernels)
  found = jax.eval_shape(sharded, kernels, jnp.asarray(x, BF16), jnp.asarray(weights, F32), indices)
  assert [g.shape for g in found] == [kernel.shape for kernel in kernels]


@pytest.mark.parametrize(
  ("rows", "width", "dtype", "reason"),
  [
    (512, 64, F32, "the kernels multiply bfloat16, and not float32"),
    (512, 48, BF16, "widths (48, 64) must be multiples of 64"),
    (3, 64, BF16, "3 rows of 4 experts, and the kernels need 1 rows for each of at most 64"),
  ],
)
def test_mixture_in_blocks_notes_why(grouped, rows, width, dtype, reason):
  with choices_of_xla() as found:
    assert experts._grouped_product(rows, 4, (width, 64), jnp.dtype(dtype)) is None
  assert list(found) == [("mixture of experts", reason)]


def test_grouped_products_of_an_odd_number_of_tokens_are_lowered_for_cuda(grouped, monkeypatch):
  """Gradients of matrices read tiles of 8 rows; products of rows have any number."""
  monkeypatch.setattr(kernel, "_product", lambda x, matrices, _: x @ matrices[0])
  monkeypatch.setattr(kernel, "_product_transposed", lambda x, matrices, _: x @ matrices[0].T)
  (kernels, *given), cotangent, indices = problem(65, 64, 64, 2, [0, 1])
  run = lambda *given: gradients(*given, indices, BF16)
  assert kernels_in(run, (kernels[1:], *given), cotangent) == 2


@pytest.mark.slow
def test_grouped_products_are_lowered_for_cuda(grouped):
  """At the sizes of the benchmark's body: two products, and two gradients of each."""
  (kernels, x, weights), cotangent, indices = problem(512, 1024, 896, 2, [0, 1])
  run = lambda *given: gradients(*given, indices, BF16)
  assert kernels_in(run, (kernels, x, weights), cotangent) == 6
  assert (
    kernels_in(jax.vmap(run), *jax.tree.map(lambda z: z[None], ((kernels, x, weights), cotangent)))
    == 6
  )
