"""Ops on a sequence that is sharded over four devices, against the float64 reference on one.

Run as a program, for the number of devices is fixed when jax starts; prints errors as JSON.
"""

import json
import re
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.ops.cases import SCANS
from tests.ops.contract import named_errors, round_to, values_and_gradients

PARTS, AXIS = 4, "sequence"
DIVIDED, WHOLE = P(None, AXIS), P()

# Shards of six tokens. Row 0: documents that end at a shard's end, begin at one, and begin inside a
# shard; one id comes back. Row 1: a document that crosses two shards' ends, and one of one token,
# the last but one of its shard: the id before it comes back, and what it had must not.
SEGMENT_IDS = np.array([[0] * 6 + [7] * 3 + [0] * 7 + [-2] * 8, [3] * 16 + [4] + [3] * 7], np.int32)


def mesh(parts: int = PARTS):
  """A mesh of the first devices, along the axis of time."""
  return jax.make_mesh(
    (parts,), (AXIS,), devices=jax.devices()[:parts], axis_types=(AxisType.Auto,)
  )


def case_of(name: str, **changes):
  """A case of T = 24, with segments and a state unless changed."""
  scan = SCANS[name]
  always = {"T": SEGMENT_IDS.shape[1], "segments": True, "chunk": 4}
  return scan, replace(scan.checks[0].case, **(always | changes))


def divided(scan, case, inputs, ids, implementation=None):
  """A function of `inputs`: (out, state) of the op on a sharded sequence."""
  over_time = scan.over_time(case, inputs)

  def shard(inputs, ids):
    args, kwargs = scan.bind(case, inputs, segment_ids=ids, implementation=implementation)
    return scan.function(*args, axis_name=AXIS, **kwargs)

  specs = {name: DIVIDED if name in over_time else WHOLE for name in inputs}
  run = jax.shard_map(shard, mesh=mesh(), in_specs=(specs, DIVIDED), out_specs=(DIVIDED, WHOLE))
  return lambda inputs: run(inputs, ids)


def errors(name: str, dtype="float32", implementation=None, **changes) -> dict[str, float]:
  """Errors of the output, the last state and all gradients."""
  scan, case = case_of(name, **changes)
  ids = jnp.asarray(SEGMENT_IDS) if case.segments else None
  inputs = scan.inputs(case)
  dtypes = {n: jnp.dtype(dtype if n in scan.narrow else "float32") for n in inputs}
  inputs = jax.tree.map(round_to, inputs, dtypes)
  with jax.enable_x64(True):
    exact = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), inputs)
    reference = lambda x: scan(case, x, segment_ids=ids, implementation="reference")
    compared = lambda x: scan.compared(*reference(x))
    want = jax.tree.map(np.asarray, values_and_gradients(compared, exact))
  passed = jax.tree.map(jnp.asarray, inputs, dtypes)
  run = divided(scan, case, passed, ids, implementation)
  got = values_and_gradients(lambda x: scan.compared(*run(x)), passed)
  return named_errors(jax.tree.map(np.asarray, got), want)


def collectives(compiled) -> list[tuple[str, int]]:
  """(Kind, bytes of the result) of every collective operation in a compiled program."""
  sizes = {"f64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "pred": 1}
  kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
  found = re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", compiled.as_text())
  arrays = lambda shape: re.findall(r"(\w+)\[([\d,]*)\]", shape)
  count = lambda size: int(np.prod([int(n) for n in size.split(",") if n]))
  return [(kind, sum(sizes[t] * count(n) for t, n in arrays(shape))) for shape, kind in found]


if __name__ == "__main__":
  print(json.dumps({call: errors(**json.loads(call)) for call in sys.argv[1:]}))
