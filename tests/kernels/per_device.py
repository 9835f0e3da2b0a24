"""Scans in programs that the compiler shards over 2 x 2 devices, against the float64 reference.

Run as a program, for the number of devices is fixed when jax starts; prints JSON. On a CPU kernels
are interpreted, which is slow, or another form of the scan stands in for them: how they are divided
is the same.
"""

import functools
import importlib
import json
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lnssm_jax import ops
from tests.ops.cases import SCANS
from tests.ops.contract import named_errors, round_to, values_and_gradients
from tests.ops.divided import collectives


def mesh():
  return jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def watched(name: str, stand_in: str | None) -> list[tuple[int, ...]]:
  """The shapes of the first argument with which "pallas_interpret" will run on each device."""
  module = importlib.import_module(f"lnssm_jax.ops.{name}.pallas")
  seen = []
  if stand_in is None:
    # Races are looked for where there is one device: the interpreter mixes those of several up.
    run = functools.partial(module.run, interpret=plgpu.InterpretGPUParams())
  else:
    run = importlib.import_module(f"lnssm_jax.ops.{name}.api").IMPLEMENTATIONS[stand_in].run
    module.unsupported = lambda inputs, options: None

  def watching(inputs, options, interpret):
    del interpret
    seen.append(inputs[0].shape)
    return run(inputs, options)

  module.run = watching
  return seen


def errors(
  name: str,
  dtype: str = "float32",
  stand_in: str | None = "reference",
  gradients: bool = True,
  **case,
):
  """Of the output, the last state and all gradients; and what each device was given."""
  scan = SCANS[name]
  both = values_and_gradients if gradients else (lambda fn, inputs: {"values": jax.jit(fn)(inputs)})
  case = replace(scan.checks[0].case, **({"segments": True, "chunk": None} | case))
  inputs = scan.inputs(case)
  dtypes = {n: jnp.dtype(dtype if n in scan.narrow else "float32") for n in inputs}
  inputs = jax.tree.map(round_to, inputs, dtypes)
  compared = lambda form, x: scan.compared(*scan(case, x, implementation=form))
  with jax.enable_x64(True):
    exact = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), inputs)
    want = both(functools.partial(compared, "reference"), exact)
    want = jax.tree.map(np.asarray, want)
  seen = watched(name, stand_in)
  with jax.set_mesh(mesh()):
    passed = jax.tree.map(jnp.asarray, inputs, dtypes)
    got = both(functools.partial(compared, "pallas_interpret"), passed)
  return named_errors(jax.tree.map(np.asarray, got), want), seen


def convolution():
  """The same of `causal_conv1d`, which is no scan of the contract; against one device."""
  rng = np.random.default_rng(0)
  shapes = {"x": (2, 5, 6), "kernel": (3, 6), "bias": (6,), "initial_state": (2, 2, 6)}
  inputs = {name: jnp.asarray(rng.normal(size=shape), "float32") for name, shape in shapes.items()}
  ids = jnp.asarray([[0, 0, 1, 1, 1], [2, 2, 2, 2, 3]])

  def run(form, inputs):
    state = ops.ConvState(inputs["initial_state"])
    options = {"initial_state": state, "segment_ids": ids, "activation": "silu"}
    x, kernel, bias = (inputs[name] for name in ("x", "kernel", "bias"))
    return ops.causal_conv1d(x, kernel, bias, implementation=form, **options)

  want = values_and_gradients(functools.partial(run, "reference"), inputs)
  seen = watched("causal_conv1d", "reference")
  with jax.set_mesh(mesh()):
    got = values_and_gradients(functools.partial(run, "pallas_interpret"), inputs)
  return named_errors(got, jax.tree.map(np.asarray, want)), seen


def traffic():
  """Collectives of linear attention whose arguments are sharded as its mesh is."""
  watched("linear_attention", "chunked")
  where = mesh()
  with jax.set_mesh(where):
    place = lambda *spec: jax.NamedSharding(where, P(*spec))
    array = lambda shape, *spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place(*spec))
    heads = array((2, 8, 2, 4), "data", None, "tensor")
    decay = array((2, 4), "tensor")
    run = functools.partial(ops.linear_attention, implementation="pallas_interpret")
    scan = lambda q, k, v, log_decay: run(q, k, v, log_decay=log_decay, normalize=True)
    return collectives(jax.jit(scan).lower(heads, heads, heads, decay).compile())


if __name__ == "__main__":
  # It asks a device that has finished whether all of them have.
  gpu_callbacks._assert_no_barriers_allocated = lambda token: token
  results = {call: errors(**json.loads(call)) for call in sys.argv[1:]}
  print(json.dumps(results | {"convolution": convolution(), "traffic": traffic()}))
