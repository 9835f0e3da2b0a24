"""Halos, positions and shifted tokens of the shards of a sequence, against the whole sequence.

Run as a program, for the number of devices is fixed when jax starts. Prints as JSON the cases that
it compared, after comparing them.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lnssm_jax.ops import ConvState, token_shift
from lnssm_jax.ops.core.halo import inputs_before, step_positions
from lnssm_jax.ops.core.segments import positions, segments_of

B, T, D, SHARDS = 2, 12, 3, 3
AXIS = "sequence"
IDS = {
  "none": None,
  "one of each shard": [[0] * 4 + [1] * 4 + [2] * 4] * B,
  "a document that ends inside": [[0] * 6 + [1] * 6, [0] * 3 + [1] * 7 + [2] * 2],
  "an id that comes back": [[0, 5, 6, 5] + [5, 5, 1, 5] + [5] * 4, [5, 5, 1, 5] * 2 + [5, 1, 5, 5]],
}


def over_shards(function, ids, *arrays):
  """`function(*arrays, ids)` of each shard; results [shards, ...]."""
  mesh = jax.make_mesh((SHARDS,), (AXIS,), axis_types=(AxisType.Auto,))
  arrays = [*arrays, *([] if ids is None else [jnp.asarray(ids)])]
  first = lambda tree: jax.tree.map(lambda x: x[None], tree)
  call = lambda *shards: first(function(*shards, *([None] if ids is None else [])))
  run = jax.shard_map(call, mesh=mesh, in_specs=P(None, AXIS), out_specs=P(AXIS))
  return jax.tree.map(np.asarray, jax.jit(run)(*arrays))


def compare_inputs_before(ids, count):
  rng = np.random.default_rng(0)
  x, first = rng.normal(size=(B, T, D)), rng.normal(size=(B, count, D))
  run = lambda x, ids: inputs_before(x, count, jnp.asarray(first), ids, axis_name=AXIS)
  got = over_shards(run, ids, x)
  np.testing.assert_allclose(got[0], first, rtol=1e-6)
  for shard, b, back in np.ndindex(SHARDS - 1, B, count):
    start = (shard + 1) * T // SHARDS
    between = () if ids is None else set(ids[b][start - 1 - back : start + 1])
    want = x[b, start - 1 - back] if len(between) <= 1 else np.zeros(D)
    np.testing.assert_allclose(got[shard + 1, b, count - 1 - back], want, rtol=1e-6)


def compare_positions(ids):
  before = jnp.asarray([0, 7])
  run = functools.partial(step_positions, B, T // SHARDS, before=before, axis_name=AXIS)
  got, length = over_shards(lambda _, ids: run(ids), ids, np.zeros((B, T)))
  segments = segments_of("test", None if ids is None else jnp.asarray(ids), B, T)
  want = positions(segments, B, T, before)
  np.testing.assert_array_equal(np.concatenate(got, axis=1), want)
  np.testing.assert_array_equal(length, np.broadcast_to(want[:, -1] + 1, (SHARDS, B)))


def compare_token_shift(ids):
  """With offsets; gradients of the weights are sums over the shards."""
  rng = np.random.default_rng(0)
  shapes = (B, T, D), (B, T, 2 * D), (2, D), (B, 1, D)
  arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
  ids = None if ids is None else jnp.asarray(ids)

  def run(x, offsets, weights, before, ids, axis_name=None):
    options = {"initial_state": ConvState(before), "segment_ids": ids, "axis_name": axis_name}
    streams, last = token_shift(x, list(weights), offsets=offsets, **options)
    return jnp.concatenate(streams, axis=-1), last

  mesh = jax.make_mesh((SHARDS,), (AXIS,), axis_types=(AxisType.Auto,))
  over_time = P(None, AXIS)
  shards = jax.shard_map(
    functools.partial(run, axis_name=AXIS),
    mesh=mesh,
    in_specs=(over_time, over_time, P(), P(), over_time),
    out_specs=(over_time, P()),
  )

  def results(run):
    results, pull = jax.vjp(lambda *arrays: run(*arrays, ids), *arrays)
    return results, pull(results)

  got, want = (jax.tree.leaves(jax.jit(lambda f=f: results(f))()) for f in (shards, run))
  for x, y in zip(got, want, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def main() -> None:
  for ids in IDS.values():
    compare_token_shift(ids)
    for count in (1, 3):
      compare_inputs_before(ids, count)
    compare_positions(ids)
  print(json.dumps(list(IDS)))


if __name__ == "__main__":
  main()
