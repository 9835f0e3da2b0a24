"""Kernels in programs that the compiler divides: each device runs them on its rows and heads."""

import contextlib
import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from lnssm_jax import ops
from lnssm_jax.ops.core import dispatch, spmd
from lnssm_jax.ops.linear_attention.api import _KERNELS as linear_attention_kernels
from tests import devices
from tests.ops.contract import tolerance
from tests.ops.divided import PARTS

LINEAR = {"name": "linear_attention", "T": 3, "K": 4, "V": 6, "H": 2}
DELTA = {"name": "delta_rule", "T": 3, "H": 2, "decay": "ordinary"}
CHANNELS = {"T": 3, "D": 4}
KERNELS = [
  LINEAR | {"decay": "HK", "normalize": True, "dtype": "bfloat16", "stand_in": None},
  CHANNELS | {"name": "diagonal_scan", "constant": True, "stand_in": None},
]
# Every scan, and what stands in for its kernels.
EACH = [
  LINEAR | {"decay": "BTHK", "normalize": True, "bonus": True},
  DELTA,
  CHANNELS | {"name": "diagonal_scan", "constant": True},
  CHANNELS | {"name": "wkv4"},
  CHANNELS | {"name": "selective_scan", "activated": True},
  CHANNELS | {"name": "longhorn_scan"},
]
MORE = [
  *KERNELS,
  LINEAR | {"decay": "BTHK", "bonus": True, "dtype": "bfloat16", "stand_in": None},
  DELTA | {"erase": True, "dtype": "bfloat16", "stand_in": None},
  CHANNELS | {"name": "wkv4", "state": False, "stand_in": None},
  *(CHANNELS | {"name": f"{n}_scan", "stand_in": None} for n in ("selective", "longhorn")),
  CHANNELS | {"name": "longhorn_scan", "activated": True},
  CHANNELS | {"name": "selective_scan", "activated": True, "dtype": "bfloat16", "stand_in": None},
  *(LINEAR | {"decay": decay, "stand_in": "chunked"} for decay in (None, "H", "BTH", "HK")),
  LINEAR | {"decay": "H", "state": False, "segments": False},
  DELTA | {"erase": True, "stand_in": "chunked"},
  CHANNELS | {"name": "diagonal_scan", "complex_": "ax", "reverse": True},
]


def check(calls):
  """Values, gradients, that each device had its part, and that nothing else is sent."""
  results = devices.result_of(
    "-m", "tests.kernels.per_device", *map(json.dumps, calls), devices=PARTS
  )
  assert results.pop("traffic") == []
  assert len(results) == len(calls) + 1
  for call, (errors, seen) in results.items():
    dtype = "bfloat16" if "bfloat16" in call else "float32"
    wrong = {name: error for name, error in errors.items() if not error < tolerance(dtype, 3)}
    assert not wrong, call
    assert any("gradients" in name for name in errors) or '"gradients": false' in call
    for rows, _, *heads_or_channels in seen:
      assert rows == 1
      assert heads_or_channels[0] == (
        3 if call == "convolution" else {2: 1, 1: 2}[len(heads_or_channels)]
      )


@pytest.mark.slow
def test_each_device_runs_its_part():
  """One kernel; others cost more than it shows."""
  check([KERNELS[1] | {"gradients": False}, *EACH])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_more_arguments_and_gradients_of_kernels(part):
  check(MORE[part::2])


def mesh(*sizes, axes=("data", "fsdp", "tensor"), types=AxisType.Auto):
  return AbstractMesh(sizes, axes, axis_types=(types,) * len(sizes))


X = jax.ShapeDtypeStruct((4, 128, 4, 64), jnp.bfloat16)


@pytest.mark.parametrize(
  ("where", "expected"),
  [
    (mesh(1, 1, 2), "pallas"),
    (mesh(2, 2, 4), "pallas"),
    (mesh(2, axes=("data",)), "pallas"),
    (mesh(1, 1, 1), "pallas"),
    (mesh(1, 1, 8), "chunked"),  # four heads
    (mesh(8, 1, 1), "chunked"),  # four rows
    (mesh(2, 2, axes=("sequence", "tensor")), "chunked"),
    (mesh(2, axes=("model",)), "chunked"),
    (mesh(2, axes=("tensor",), types=AxisType.Explicit), "chunked"),
    (None, "chunked"),
  ],
  ids=str,
)
def test_where_kernels_are_taken(hopper, monkeypatch, where, expected):
  """Where rows and heads divide evenly over a mesh of known axes that is left to the compiler."""
  monkeypatch.setattr(jax, "device_count", lambda: 16)
  found = []

  def scan(x):
    found.append(dispatch.check(ops.linear_attention, x, x, x).choose())

  with jax.sharding.use_abstract_mesh(where) if where else contextlib.nullcontext():
    jax.eval_shape(scan, X)
  assert found == [expected]


def test_a_part_decides_what_can_run(monkeypatch):
  """65,536 rows are more than a grid of blocks has; half of them are not."""
  monkeypatch.setattr(jax, "device_count", lambda: 2)
  x = jax.ShapeDtypeStruct((65_536, 2, 4), jnp.float32)
  able = lambda x: found.append(ops.supported(ops.diagonal_scan, x, x))
  found = []
  for where in (mesh(1, 1, 1), mesh(2, 1, 1)):
    with jax.sharding.use_abstract_mesh(where):
      jax.eval_shape(able, x)
  assert ["pallas_interpret" in names for names in found] == [False, True]


@pytest.mark.parametrize(
  ("shared", "heads", "axes"), [(4, 4, ("tensor",)), (2, 4, ("tensor",)), (1, 4, ()), (3, 6, None)]
)
def test_shared_heads_are_sharded_with_those_that_share_them(shared, heads, axes):
  """One for all is replicated; three over two devices would leave a group on both."""
  mesh = AbstractMesh((1, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
  q, v = (jax.ShapeDtypeStruct((2, 3, h, 5), jnp.bfloat16) for h in (shared, heads))
  with jax.sharding.use_abstract_mesh(mesh):
    division = spmd.division(("BTHK", "BTHV"), ("BTHV", "BH"), (q, v))
  assert (division is None) == (axes is None)
  if division is not None:
    assert division._spec("BTHK", q.shape) == PartitionSpec((), (), axes, ())
    assert division._spec("BTHV", v.shape) == PartitionSpec((), (), ("tensor",), ())


@pytest.mark.parametrize(("states", "sharded"), [(2, True), (1, False)])
def test_one_state_of_all_heads_is_not_sharded_with_their_queries(monkeypatch, states, sharded):
  """Each device would return it; then XLA's form runs, which the compiler partitions."""
  monkeypatch.setattr(jax, "device_count", lambda: 2)
  mesh = AbstractMesh((1, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
  q, k = (jax.ShapeDtypeStruct((2, 3, heads, 5), jnp.bfloat16) for heads in (4, states))
  found = []

  def look(q, k):
    inputs = dispatch.check("linear_attention", q, k, k).inputs
    found.append(linear_attention_kernels._division(inputs) is not None)

  with jax.sharding.use_abstract_mesh(mesh):
    jax.eval_shape(look, q, k)
  assert found == [sharded]
