"""Options that change what a mixer carries, on a sequence sharded over two devices: a process."""

import json

import jax
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lnssm_jax.mixers import MIXERS, shard_time
from tests.mixers.helpers import relative_error
from tests.mixers.tiny import DIM, HEADS, disturbed, inputs

CASES = [
  ("dss", {"state_dim": 3, "separate_steps": True}),
  ("gated_delta_net", HEADS | {"conv_size": None, "num_value_heads": 4}),
  ("gla", HEADS | {"conv_size": 4, "num_kv_heads": 1}),
  ("gsa", HEADS | {"conv_size": 3, "num_slots": 3}),
  ("lnssm", HEADS | {"feature_map": "identity"}),
  ("lnssm", HEADS | {"shift": "none", "use_decay": False}),
  ("mamba2", {"head_dim": 4, "state_dim": 3, "num_groups": 2, "conv_size": None}),
  ("mamba3", {"head_dim": 8, "state_dim": 4, "mimo_rank": 2}),
  ("metala", HEADS | {"conv_size": None}),
  ("qlstm", {"variant": "paper"}),
  ("rwkv5", HEADS | {"decay": "head"}),
  ("softmax_attention", HEADS | {"soft_cap": 1.0, "sinks": True, "max_length": 16}),
  ("softmax_attention", HEADS | {"kv_rank": 3, "rotary_width": 2, "max_length": 16}),
  ("tnl", HEADS | {"variant": "transnormerllm"}),
]


def error(name, options, mesh) -> float:
  """The largest error of the outputs and of the states."""
  build = lambda: MIXERS[name](DIM, **options, rngs=nnx.Rngs(0))
  mixer, x = disturbed(build)[0], inputs(2, 8)
  want = jax.jit(lambda x: mixer(x))(x)
  graphdef, params = nnx.split(shard_time(mixer, "sequence"), nnx.Param)
  run = jax.shard_map(
    lambda params, x: nnx.merge(graphdef, params)(x),
    mesh=mesh,
    in_specs=(P(), P(None, "sequence")),
    out_specs=(P(None, "sequence"), P()),
  )
  pairs = zip(jax.tree.leaves(jax.jit(run)(params, x)), jax.tree.leaves(want), strict=True)
  return max(relative_error(got, expected) for got, expected in pairs if expected.size)


def main():
  mesh = jax.make_mesh((2,), ("sequence",), axis_types=(AxisType.Auto,))
  print(json.dumps({f"{name} {options}": error(name, options, mesh) for name, options in CASES}))


if __name__ == "__main__":
  main()
