"""Ops on a sequence that is sharded over four devices: the same numbers as on one."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from lnssm_jax import ops
from lnssm_jax.ops.core import dispatch
from lnssm_jax.ops.core.halo import inputs_before
from tests import devices
from tests.ops import halo
from tests.ops.contract import tolerance
from tests.ops.divided import AXIS, DIVIDED, PARTS, SEGMENT_IDS, WHOLE

LINEAR = {"name": "linear_attention"}
# Every argument once, with segments and a state. Decays are slow, so that a state which should have
# been reset, or decayed once more, is seen in the next shard. The form of the scan itself is the
# one that compiles fastest: the exchange is the same for all.
EACH = [
  LINEAR | {"decay": "HK", "normalize": True, "bonus": True, "strength": "weak"},
  LINEAR | {"decay": "BTHK", "value_decay": "BTHV", "strength": "weak"},
  {"name": "diagonal_scan", "complex_": "ax", "reverse": True, "strength": "weak"},
  {"name": "wkv4", "strength": "weak"},
  {"name": "selective_scan", "strength": "weak"},
  {"name": "longhorn_scan", "strength": "weak", "activated": True},
  {"name": "delta_rule", "decay": "weak", "channels": True, "rates": "column", "keys": "before"},
  {"name": "elementwise_decay_scan", "decay": "function"},
  {"name": "long_convolution", "kernel": "complex"},
  {"name": "attention", "window": 5},
]
MANY = [
  LINEAR | {"decay": "HK", "H": 4, "readers": 2, "own_decays": True, "strength": "weak"},
  {"name": "diagonal_scan", "constant": True},
  {"name": "attention", "cached": [12, 3]},
  *(
    LINEAR | {"decay": decay, "strength": strength, "segments": segments}
    for decay in (None, "H", "HK", "BTH", "BTHK")
    for strength, segments in (("extreme", True), ("weak", False))
  ),
  *(LINEAR | {"normalize": True, "decay": decay, "bonus": True} for decay in ("HK", "BTHK")),
  LINEAR | {"decay": "BTH", "value_decay": "BTHV", "strength": "extreme"},
  LINEAR | {"decay": None, "value_decay": "HV", "state": False},
  LINEAR | {"decay": "BTHK", "dtype": "bfloat16"},
  LINEAR | {"decay": "BTHK", "H": 4, "readers": 2, "normalize": True, "strength": "weak"},
  LINEAR | {"decay": "BTHK", "H": 4, "shared": 2, "strength": "weak"},
  {"name": "delta_rule", "decay": "weak", "H": 4, "readers": 2},
  {"name": "delta_rule", "decay": "weak", "H": 4, "shared": 4, "erase": True},
  *(
    {"name": "diagonal_scan", "complex_": c, "constant": constant, "reverse": reverse}
    for c, constant, reverse in [("", False, True), ("ax", True, False), ("a", False, True)]
  ),
  {"name": "diagonal_scan", "strength": "extreme", "state": False, "segments": False},
  LINEAR | {"decay": "BTHK", "normalize": True, "strength": "extreme"},
  {"name": "delta_rule", "decay": "extreme"},
  *({"name": "wkv4", "strength": s, "segments": s == "extreme"} for s in ("weak", "extreme")),
  *({"name": n, "strength": "extreme"} for n in ("selective_scan", "longhorn_scan")),
  {"name": "selective_scan", "strength": "weak", "activated": True},
  *(
    {"name": n, "strength": "weak", "segments": False} for n in ("selective_scan", "longhorn_scan")
  ),
  {"name": "delta_rule", "erase": True, "decay": "ordinary"},
  {"name": "delta_rule", "rates": "column", "decay": "extreme"},
  {"name": "delta_rule", "segments": False, "state": False},
  {"name": "delta_rule", "decay": "weak", "rates": "column", "erase": True},
  {"name": "delta_rule", "decay": "weak", "channels": True, "keys": "write"},
  {"name": "elementwise_decay_scan", "decay": "BTHKV", "strength": "extreme"},
  {"name": "elementwise_decay_scan", "decay": "HKV", "segments": False},
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
  results = devices.result_of("-m", "tests.ops.divided", *map(json.dumps, calls), devices=PARTS)
  assert len(results) == len(calls)
  for call, errors in results.items():
    limit = tolerance(json.loads(call).get("dtype", "float32"), SEGMENT_IDS.shape[1])
    wrong = {name: error for name, error in errors.items() if not error < limit}
    assert not wrong, call
    assert any("gradients" in name for name in errors)


def test_every_op_sharded_equals_the_whole_sequence():
  check([call | {"implementation": "reference"} for call in EACH])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_every_option_sharded_equals_the_whole_sequence(part):
  check((EACH + MANY)[part::4])


@pytest.mark.slow
def test_communication_of_a_layer_does_not_grow_with_length():
  """A layer of the LNSSM and its gradients: the neighbor's last token, one gather of the states.

  Backward the same, transposed; the all-reduce is of the gradients of the parameters.
  """
  short, long = devices.result_of("-m", "tests.models.sharded", "traffic", devices=PARTS)
  assert short == long
  kinds, sizes = zip(*short, strict=True)
  once = ("all-gather", "all-reduce", "collective-permute", "collective-permute", "reduce-scatter")
  assert kinds == once
  B, H, K, D = 2, 2, 4, 8
  summary = 4 * (B * H * (K * K + K) + H * K)  # bytes: kv and key_sum; the sums of log decays
  assert sizes[0] == 4 * summary  # that of every shard
  assert sizes[2:] == (4 * B * D, 4 * B * D, summary)


def test_what_crosses_shards_is_of_the_same_document():
  """The inputs before a shard, and positions: also where an id comes back in another document."""
  cases = devices.result_of("-m", "tests.ops.halo", devices=halo.SHARDS)
  assert cases == list(halo.IDS)


MESH = AbstractMesh((4,), (AXIS,), axis_types=(AxisType.Auto,))


def shapes(fn, *args, specs):
  """`fn` on four shards, without any device."""
  run = jax.shard_map(fn, mesh=MESH, in_specs=specs, out_specs=WHOLE)
  return jax.eval_shape(run, *args)


def test_axis_name_that_is_not_mapped_raises():
  x = jnp.ones((1, 4, 2))
  with pytest.raises(ValueError, match="axis_name='time' is not a mapped axis here"):
    ops.diagonal_scan(jnp.ones(2), x, axis_name="time")


def test_sharded_taps_raise():
  call = lambda x: ops.long_convolution(x, jnp.ones((3, 2)), axis_name=AXIS)[0].sum()
  with pytest.raises(NotImplementedError, match="axis_name='sequence' with a kernel of taps"):
    shapes(call, jnp.ones((1, 8, 2)), specs=DIVIDED)


def test_sharded_acausal_attention_raises():
  call = lambda x: ops.attention(x, x, x, causal=False, axis_name=AXIS)[0].sum()
  with pytest.raises(NotImplementedError, match="axis_name='sequence' with causal=False"):
    shapes(call, jnp.ones((1, 8, 2, 3)), specs=DIVIDED)


def test_sharded_op_without_sharded_form_raises():
  def call(x):
    indices = jnp.zeros((*x.shape[:2], 1), jnp.int32)
    gates = jnp.ones(indices.shape)
    options = {"num_partitions": 2, "axis_name": AXIS}
    return ops.sparse_state_attention(x, x, x, indices, gates, **options)[0].sum()

  with pytest.raises(NotImplementedError, match="this op needs the whole sequence"):
    shapes(call, jnp.ones((1, 8, 2, 3)), specs=DIVIDED)


def test_shards_shorter_than_the_halo_raise():
  fetch = lambda x: inputs_before(x, 3, None, None, axis_name=AXIS).sum()
  with pytest.raises(ValueError, match="a shard of the sequence has 2 tokens, but 3 tokens before"):
    shapes(fetch, jnp.ones((1, 8, 2)), specs=DIVIDED)


def test_length_that_is_no_multiple_of_the_shards_raises():
  with pytest.raises(ValueError, match="divisible"):
    shapes(lambda x: x.sum(), jnp.ones((1, 6, 2)), specs=P(None, AXIS))


def test_sharded_bad_argument_raises_as_the_op():
  call = lambda x: ops.linear_attention(x, x[..., 1:], x, axis_name=AXIS)[0].sum()
  with pytest.raises(ValueError, match="linear_attention: k has shape"):
    shapes(call, jnp.ones((1, 8, 2, 3)), specs=DIVIDED)


def test_kernels_are_preferred_where_every_mesh_axis_is_mapped(monkeypatch):
  """XLA partitions the axes that are left to it, but no kernel."""
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
