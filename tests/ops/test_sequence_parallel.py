"""Scans on a sequence that four devices share: the same numbers as on one, for one exchange."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from lnssm_jax import ops
from lnssm_jax.ops import dispatch, sequence_parallel
from tests.ops.contract import tolerance
from tests.ops.divided import AXIS, DIVIDED, SEGMENT_IDS, WHOLE, run_here

# Once each, with segments, a state and, where there is one, an extreme decay. The form of the scan
# itself is the one that compiles fastest: the exchange is the same for all.
EACH = [
  {"name": "linear_attention", "decay": "BTHK", "normalize": True, "strength": "extreme"},
  {"name": "diagonal_scan", "complex_": "ax"},
  {"name": "wkv4"},
  {"name": "selective_scan"},
  {"name": "longhorn_scan"},
  {"name": "delta_rule", "decay": "extreme"},
  {"name": "elementwise_decay_scan", "decay": "function"},
  {"name": "attention", "window": 5},
]
LINEAR = {"name": "linear_attention"}
MANY = [
  *(
    LINEAR | {"decay": decay, "strength": strength, "segments": segments}
    for decay in (None, "H", "HK", "BTH", "BTHK")
    for strength, segments in (("extreme", True), ("weak", False))
  ),
  *(LINEAR | {"normalize": True, "decay": decay, "bonus": True} for decay in ("HK", "BTHK")),
  LINEAR | {"decay": "BTH", "value_decay": "BTHV", "strength": "extreme"},
  LINEAR | {"decay": None, "value_decay": "HV", "state": False},
  LINEAR | {"decay": "BTHK", "dtype": "bfloat16"},
  *(
    {"name": "diagonal_scan", "complex_": c, "constant": constant, "reverse": reverse}
    for c, constant, reverse in [("", False, True), ("ax", True, False), ("a", False, True)]
  ),
  {"name": "diagonal_scan", "strength": "extreme", "state": False, "segments": False},
  *({"name": "wkv4", "strength": s, "segments": s == "extreme"} for s in ("weak", "extreme")),
  *({"name": n, "strength": "extreme"} for n in ("selective_scan", "longhorn_scan")),
  *(
    {"name": n, "strength": "weak", "segments": False} for n in ("selective_scan", "longhorn_scan")
  ),
  {"name": "delta_rule", "erase": True, "decay": "ordinary"},
  {"name": "delta_rule", "rates": "column", "decay": "extreme"},
  {"name": "delta_rule", "segments": False, "state": False},
  {"name": "elementwise_decay_scan", "decay": "BTHKV", "strength": "extreme"},
  {"name": "elementwise_decay_scan", "decay": "HKV", "segments": False},
  {"name": "long_convolution", "kernel": "complex"},
  {"name": "long_convolution", "kernel": "real", "segments": False},
  {"name": "attention"},
  *(
    {"name": "attention", "window": window, "block": block, "cached": [12, 3]}
    for window, block in [(None, None), (5, None), (9, None), (None, 5), (None, 20)]
  ),
  {"name": "attention", "segments": False, "cached": [5, 7], "heads": [4, 2]},
]


def check(calls):
  """Runs them in one program: starting jax takes seconds."""
  results = run_here("-m", "tests.ops.divided", *map(json.dumps, calls))
  assert len(results) == len(calls)
  for call, errors in results.items():
    limit = tolerance(json.loads(call).get("dtype", "float32"), SEGMENT_IDS.shape[1])
    wrong = {name: error for name, error in errors.items() if not error < limit}
    assert not wrong, call
    assert any("gradients" in name for name in errors)


def test_values_states_and_gradients_are_those_of_the_whole_sequence():
  check([call | {"implementation": "reference"} for call in EACH])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_every_option_and_the_default_forms(part):
  check((EACH + MANY)[part::4])


def test_communication_is_one_exchange_that_does_not_grow_with_the_length():
  """A layer of the LNSSM and its gradients: the neighbour's last token, one gather of the states.

  Backwards the same, transposed; the all-reduce is of the gradients of the parameters.
  """
  short, long = run_here("-m", "tests.models.divided", "traffic")
  assert short == long
  kinds, sizes = zip(*short, strict=True)
  once = ("all-gather", "all-reduce", "collective-permute", "collective-permute", "reduce-scatter")
  assert kinds == once
  B, H, K, D = 2, 2, 4, 8
  summary = 4 * (B * H * (K * K + K) + H * K)  # bytes: kv and key_sum; the sums of log decays
  assert sizes[0] == 4 * summary  # that of every part
  assert sizes[2:] == (4 * B * D, 4 * B * D, summary)


PARTS = AbstractMesh((4,), (AXIS,), axis_types=(AxisType.Auto,))


def shapes(fn, *args, specs):
  """`fn` on four parts, without any device."""
  run = jax.shard_map(fn, mesh=PARTS, in_specs=specs, out_specs=WHOLE)
  return jax.eval_shape(run, *args)


def test_an_axis_that_is_not_mapped_is_refused():
  x = jnp.ones((1, 4, 2))
  with pytest.raises(ValueError, match="axis_name='time' is not a mapped axis here"):
    sequence_parallel.diagonal_scan(jnp.ones(2), x, axis_name="time")


def test_without_an_axis_they_are_the_scans_themselves():
  x = jax.random.normal(jax.random.key(0), (1, 4, 2))
  got = sequence_parallel.diagonal_scan(jnp.full(2, 0.5), x, axis_name=None)
  assert jnp.array_equal(got[0], ops.diagonal_scan(jnp.full(2, 0.5), x)[0])


def test_taps_are_refused():
  with pytest.raises(NotImplementedError, match="a kernel of taps cannot run on a divided"):
    sequence_parallel.long_convolution(jnp.ones((1, 4, 2)), jnp.ones((3, 2)), axis_name=AXIS)


def test_parts_shorter_than_what_is_fetched_from_them_are_refused():
  fetch = lambda x: sequence_parallel.inputs_before(x, 3, None, None, axis_name=AXIS).sum()
  with pytest.raises(ValueError, match="a part of the sequence has 2 steps, but 3 steps before"):
    shapes(fetch, jnp.ones((1, 8, 2)), specs=DIVIDED)


def test_a_length_that_does_not_divide_is_refused():
  with pytest.raises(ValueError, match="divisible"):
    shapes(lambda x: x.sum(), jnp.ones((1, 6, 2)), specs=P(None, AXIS))


def test_wrong_arguments_are_refused_as_the_scan_does():
  call = lambda x: sequence_parallel.linear_attention(x, x[..., 1:], x, axis_name=AXIS)[0].sum()
  with pytest.raises(ValueError, match="linear_attention: k has shape"):
    shapes(call, jnp.ones((1, 8, 2, 3)), specs=DIVIDED)


def test_kernels_are_taken_where_every_axis_of_the_mesh_is_mapped(monkeypatch):
  """XLA divides what is left to it, but not a kernel."""
  monkeypatch.setattr(jax, "device_count", lambda: 4)
  mesh = AbstractMesh((2, 2), ("fsdp", AXIS), axis_types=(AxisType.Auto,) * 2)
  found = []

  def part(x):
    found.append(dispatch._on_one_device(x))
    return x

  for axes in ({AXIS}, {AXIS, "fsdp"}):
    run = jax.shard_map(part, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), axis_names=axes)
    jax.eval_shape(run, jnp.ones(4))
  assert found == [False, True]
